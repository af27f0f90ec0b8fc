#pragma once

// What draft-queue.h uses of libllama.

#include <cstddef>
#include <cstdint>

#define LLAMA_API

using llama_pos    = int32_t;
using llama_token  = int32_t;
using llama_seq_id = int32_t;

struct llama_context;
using llama_memory_t = const llama_context *;

enum llama_process_type { LLAMA_PROCESS_TYPE_DECODE };

struct llama_batch_ext;

llama_memory_t llama_get_memory(const llama_context * ctx);
llama_pos      llama_memory_seq_pos_max(llama_memory_t memory, llama_seq_id seq_id);
int32_t        llama_process(llama_context * ctx, llama_process_type type, llama_batch_ext * batch);
