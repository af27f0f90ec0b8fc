# Compiled into the llama target, in place. Included by src/CMakeLists.txt of the patched tree, which knows LLAMA_PHASE_ENGINE_DIR.

set(LLAMA_PHASE_SOURCES
    ${LLAMA_PHASE_ENGINE_DIR}/draft-depth.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/expert-admission.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/expert-arena.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/expert-cache.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/expert-graph.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/expert-ring.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/expert-ring-plan.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/expert-store.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/graph-writes.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/host-pool.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/input-upload.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/kpool-mask.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/kpool-memo.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/kv-buffer.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/kv-place.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/kv-rows-host.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/lent-buffer.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-api.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-chunks.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-config.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-context.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-graphs.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-group.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-kv.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-select.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-stats.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-swap.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-ubatch.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/phase-ubatch-plan.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/slot-count.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/slot-policy.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/transaction.cpp
    )

target_sources(llama PRIVATE ${LLAMA_PHASE_SOURCES})
set_source_files_properties(${LLAMA_PHASE_SOURCES} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
set_source_files_properties(${LLAMA_PHASE_ENGINE_DIR}/kv-buffer.cpp PROPERTIES INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/ggml/src)

target_include_directories(llama PRIVATE ${PROJECT_SOURCE_DIR}/vendor)
target_include_directories(llama PUBLIC  ${LLAMA_PHASE_ENGINE_DIR})

# a buffer type of our own, and a graph's nodes, need ggml's private headers
set_source_files_properties(${LLAMA_PHASE_ENGINE_DIR}/host-pool.cpp ${LLAMA_PHASE_ENGINE_DIR}/graph-writes.cpp
    ${LLAMA_PHASE_ENGINE_DIR}/lent-buffer.cpp PROPERTIES INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/ggml/src)
