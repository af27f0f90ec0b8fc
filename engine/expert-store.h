#pragma once

// Which layers' experts are in host memory, where they are, and whether their device can read them in place.
//
// One store per model, shared by its contexts: memory can be registered with the driver only once.

#include "expert-op.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

struct llama_model;
struct ggml_tensor;
struct phase_config;
class phase_faults;

struct expert_layer {
    int                        il;
    ggml_backend_dev_t         dev;      // owns the layer
    std::vector<ggml_tensor *> weights;  // gate, up, down, or gate_up, down; down is always the last
    int32_t                    n_expert; // experts in the tensors
    int32_t                    n_used;   // experts a token uses
    std::string                pin_failure; // why the device cannot read them, or empty
    std::string                copied;      // why they are in pinned memory of ours and not where the file is mapped, or empty

    bool pinned() const { return pin_failure.empty(); }

    size_t stride(size_t i) const; // bytes of one expert of weights[i]
    size_t expert_bytes()   const; // of one expert, all tensors
    size_t layer_bytes()    const; // of all experts
};

struct expert_store {
    std::vector<expert_layer>                layers;   // by il; those that are not pinned can only be streamed through a staging ring
    std::vector<std::pair<int, std::string>> unusable; // layers with host experts that keep the stock path, and why

    size_t pinned_bytes = 0; // registered by us, or in the device's host buffer

    // The store of the model, made at the first call: finds the layers, then pins them piece by piece. Layers that touch a piece that cannot
    // be pinned move to pinned memory, and to the store's end the model's tensors point there; with no memory for that they stay, not
    // pinned. `config`: of the first caller, for its faults.
    static std::shared_ptr<expert_store> of(const llama_model & model, const phase_config & config);

    ~expert_store();

  private:
    struct piece {
        char *                    begin;
        char *                    end;
        size_t                    layer; // index into `layers`
        const phase_backend_api * api;
        std::string               failure;
    };

    struct moved_tensor {
        ggml_tensor         * tensor;
        void                * data; // where it was
        ggml_backend_buffer * buffer;
    };

    std::vector<piece> pieces; // registered with the driver

    std::vector<ggml_backend_buffer_ptr> copies; // one for each layer that moved
    std::vector<moved_tensor>            moved;

    void        find_layers(const llama_model & model);
    void        pin_layers(const phase_config & config);
    void        move_unpinned(phase_faults & faults);
    std::string move(expert_layer & layer); // why not, or empty
};

// the operators of a device's backend; null when it is the CPU or has none
const phase_backend_api * phase_backend_api_of(ggml_backend_dev_t dev);
