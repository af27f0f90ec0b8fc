s/extern __shared__ uint32_t \([a-z]*\)\[\];/uint32_t * \1 = emulated::state().dynamic.data();/
s/__shared__ /static /
s/\([a-z_]*\)<<<\(.*\)>>>\((.*)\);/emulated::launch(\2, [=] { \1\3; });/
s/^#pragma unroll.*//
