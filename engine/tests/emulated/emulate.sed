s/extern __shared__ \([a-z0-9_]*\) \([a-z]*\)\[\];/\1 * \2 = (\1 *) emulated::state().dynamic.data();/
s/__shared__ /static /
s/asm volatile(.*);$/(void) p;/
s/\([a-z_]*\)<<<\(.*\)>>>\((.*)\);/emulated::launch(\2, [=] { \1\3; });/
s/^#pragma unroll.*//
