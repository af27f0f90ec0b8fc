"""LoRA adapters for synthetic models."""

from __future__ import annotations

from pathlib import Path

from .gguf_file import llama_cpp_dir, use_gguf_py


def write_adapter(path: Path, model: Path, *names: str, rank: int = 4) -> Path:
    """A LoRA adapter on those tensors of the model, at `path`: it adds more than what they give."""
    use_gguf_py(llama_cpp_dir(None))
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, rank)
    random = np.random.default_rng(1)
    shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
    for name in names:
        n_in, n_out, *n_expert = shapes[name]
        down, up = (*n_expert, rank, n_in), (*n_expert, n_out, rank)
        for part, shape, std in (("a", down, n_in**-0.5), ("b", up, 4 * rank**-0.5)):
            writer.add_tensor(f"{name}.lora_{part}", random.normal(0, std, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
