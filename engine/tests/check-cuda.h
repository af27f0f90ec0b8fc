#pragma once

// For the CUDA tests of this folder: a call of the runtime that fails ends the program with 1.

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                                         \
    do {                                                                                                    \
        const cudaError_t error_ = (call);                                                                  \
        if (error_ != cudaSuccess) {                                                                        \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            std::exit(1);                                                                                   \
        }                                                                                                   \
    } while (0)
