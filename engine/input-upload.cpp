#include "input-upload.h"

#include "expert-op.h"
#include "expert-store.h"
#include "sched-inputs.h"
#include "upload-stage.h"

#include "ggml.h"
#include "llama-impl.h"

#include <cstdint>

static constexpr size_t STAGE_BYTES = size_t(256) << 10;

struct input_upload::device_stage {
    ggml_backend_t            backend = nullptr;
    const phase_backend_api * api     = nullptr;
    void                    * memory  = nullptr;
    phase_upload_side         side;

    std::unique_ptr<upload_stage> stage;

    ~device_stage() {
        if (memory) {
            ggml_backend_synchronize(backend);
            api->upload_free(&side);
            api->host_free(memory);
        }
    }
};

std::unique_ptr<input_upload> input_upload::create(const std::vector<ggml_backend_t> & backends) {
    auto upload = std::make_unique<input_upload>();
    for (auto * backend : backends) {
        const auto * api = phase_backend_api_of(ggml_backend_get_device(backend));
        if (!api) {
            continue;
        }
        auto device = std::make_unique<device_stage>();
        device->backend = backend;
        device->api     = api;
        if (const char * error = api->host_alloc(STAGE_BYTES, &device->memory)) {
            LLAMA_LOG_WARN("llama-phase: inputs are copied one by one to %s: %s\n", ggml_backend_name(backend), error);
            device->memory = nullptr;
            continue;
        }
        device->stage = std::make_unique<upload_stage>((uint8_t *) device->memory, STAGE_BYTES, upload_stage_effects {
            [device = device.get()](const phase_upload_piece * pieces, int32_t n) { device->api->upload(device->backend, &device->side, pieces, n); },
            [backend] { ggml_backend_synchronize(backend); },
        });
        upload->stages.push_back(std::move(device));
    }
    return upload->stages.empty() ? nullptr : std::move(upload);
}

input_upload::~input_upload() = default;

input_upload::device_stage * input_upload::of(ggml_backend_t backend) const {
    for (const auto & stage : stages) {
        if (stage->backend == backend) {
            return stage.get();
        }
    }
    return nullptr;
}

void input_upload::install(ggml_backend_sched_t sched) {
    phase_sched_inputs inputs;
    inputs.add = [](void * data, ggml_backend_t backend, const ggml_tensor * src, ggml_tensor * dst) {
        auto * device = ((input_upload *) data)->of(backend);
        auto * buffer = src->view_src ? src->view_src->buffer : src->buffer;
        // what the CPU computes is there: its backend returns when it is done
        return device && buffer && ggml_backend_buffer_is_host(buffer) &&
                ggml_backend_buffer_get_usage(buffer) == GGML_BACKEND_BUFFER_USAGE_COMPUTE && ggml_is_contiguous(src) &&
                device->stage->add(src->data, ggml_nbytes(src), dst->data);
    };
    inputs.flush = [](void * data, ggml_backend_t backend) {
        if (auto * device = ((input_upload *) data)->of(backend)) {
            device->stage->flush();
        }
    };
    inputs.data = this;
    phase_sched_set_inputs(sched, inputs);
}
