#pragma once

// Which layers' experts are in host memory, where they are, and whether their device can read them in place.
//
// One store per model, shared by its contexts: memory can be registered with the driver only once.

#include "expert-op.h"

#include "ggml-backend.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

struct llama_model;
struct ggml_tensor;
struct phase_config;

struct expert_layer {
    int                        il;
    ggml_backend_dev_t         dev;      // owns the layer
    std::vector<ggml_tensor *> weights;  // gate, up, down, or gate_up, down; down is always the last
    int32_t                    n_expert; // experts in the tensors
    int32_t                    n_used;   // experts a token uses
    std::string                pin_failure; // why the device cannot read them in place, or empty

    bool pinned() const { return pin_failure.empty(); }

    size_t stride(size_t i) const; // bytes of one expert of weights[i]
    size_t expert_bytes()   const; // of one expert, all tensors
    size_t layer_bytes()    const; // of all experts
};

struct expert_store {
    std::vector<expert_layer>                layers;   // by il; those that are not pinned can only be streamed through a staging ring
    std::vector<std::pair<int, std::string>> unusable; // layers with host experts that keep the stock path, and why

    size_t pinned_bytes = 0; // registered by us, or in the device's host buffer

    // The store of the model, made at the first call: finds the layers, then pins them piece by piece. A piece that cannot be pinned costs
    // the layers that touch it, no others. `config`: of the first caller, for its faults.
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

    std::vector<piece> pieces; // registered with the driver

    void find_layers(const llama_model & model);
    void pin_layers(const phase_config & config);
};

// the operators of a device's backend; null when it is the CPU or has none
const phase_backend_api * phase_backend_api_of(ggml_backend_dev_t dev);
