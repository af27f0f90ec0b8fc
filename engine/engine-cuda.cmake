# Compiled into the ggml-cuda target, in place. Included by ggml/src/ggml-cuda/CMakeLists.txt of the patched tree.

target_sources(ggml-cuda PRIVATE
    ${LLAMA_PHASE_ENGINE_DIR}/expert-cuda.cu
    ${LLAMA_PHASE_ENGINE_DIR}/expert-cuda-fetch.cu
    ${LLAMA_PHASE_ENGINE_DIR}/expert-cuda-pin.cu
    ${LLAMA_PHASE_ENGINE_DIR}/expert-cuda-prefetch.cu
    ${LLAMA_PHASE_ENGINE_DIR}/expert-cuda-stream.cu
    ${LLAMA_PHASE_ENGINE_DIR}/input-cuda.cu
    ${LLAMA_PHASE_ENGINE_DIR}/kv-attention-cuda.cu
    ${LLAMA_PHASE_ENGINE_DIR}/kv-cuda.cu
    ${LLAMA_PHASE_ENGINE_DIR}/kv-rows-cuda.cu
    ${LLAMA_PHASE_ENGINE_DIR}/select-cuda.cu
    )
target_include_directories(ggml-cuda PRIVATE ${LLAMA_PHASE_ENGINE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})

# Static libraries that a toolkit links in stay this library's own. Seen: it exported a part of libstdc++, libllama was bound to that, and a
# process that had another copy, Python, died in a stream.
if (BUILD_SHARED_LIBS AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    target_link_options(ggml-cuda PRIVATE LINKER:--exclude-libs,ALL)
endif()
