"""Synthetic GGUF models: random weights that llama.cpp loads, with activations of sane size and text that varies.

    spec        every size and statistic of a model, and the presets
    checked_spec  from flags to a spec that llama.cpp can run, or a refusal
    blocks      random weights drawn directly as F32, F16, Q8_0, Q4_0 or Q4_K blocks
    vocabulary  a tokenizer cut to size, and which of its tokens may be generated
    tensors     the tensor list; each tensor is generated only when it is written
    embeddings  token embeddings and an LM head with a planted successor for each token
    layers      the blocks of qwen4exp, qwen35moe and qwen3moe
    metadata    the key-value section
    writer      the file, written whole or not at all
    gguf_file   the pinned source's gguf module, and a fast reader of key-value sections

Only spec and gguf_file can be imported before gguf_file.use_gguf_py() has run.
"""
