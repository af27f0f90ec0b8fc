// Host memory that the GPUs read in place.

#include "pinned-cuda.cuh"

#include "expert-cuda-kernels.cuh"
#include "pinned-pieces.h"

#include <cstdio>
#include <mutex>
#include <shared_mutex>

static std::shared_mutex   pieces_lock;
static phase_pinned_pieces pieces;

static thread_local char failure[512];

static const char * fail(const char * format, cudaError_t error) {
    (void) cudaGetLastError(); // it would be reported by the next unrelated call
    std::snprintf(failure, sizeof(failure), format, cudaGetErrorString(error));
    return failure;
}

// Every device has to read registered memory at its host address, read-only pages included.
static const char * check_devices(bool & read_only) {
    int n_devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&n_devices);
    if (error != cudaSuccess) {
        return fail("no usable device: %s", error);
    }
    read_only = n_devices > 0;
    for (int device = 0; device < n_devices; ++device) {
        int same_address = 0;
        int supported    = 0;
        if (cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device) != cudaSuccess || !same_address) {
            (void) cudaGetLastError();
            std::snprintf(failure, sizeof(failure), "device %d cannot read registered memory at its host address", device);
            return failure;
        }
        if (cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported, device) != cudaSuccess) {
            (void) cudaGetLastError();
        }
        read_only = read_only && supported;
    }
    return nullptr;
}

const char * phase_cuda_pin(void * ptr, size_t size) {
    bool read_only = false;
    if (const char * reason = check_devices(read_only)) {
        return reason;
    }

    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    cudaError_t error = cudaHostRegister(ptr, size, flags | (read_only ? cudaHostRegisterReadOnly : 0));
    if (error == cudaErrorNotSupported && read_only) {
        (void) cudaGetLastError();
        error = cudaHostRegister(ptr, size, flags); // memory that may be written
    }

    switch (error) {
        case cudaSuccess: {
            std::unique_lock<std::shared_mutex> guard(pieces_lock);
            pieces.add(ptr, size);
            return nullptr;
        }
        case cudaErrorHostMemoryAlreadyRegistered:
            return fail("part of it is registered already (%s)", error);
        case cudaErrorMemoryAllocation:
            return fail("%s: not enough memory that may be locked", error);
        default:
            return fail(read_only ? "%s: the file system or the kernel does not let the driver lock mapped pages"
                                  : "%s: this driver cannot register read-only pages", error);
    }
}

void phase_cuda_unpin(void * ptr) {
    {
        std::unique_lock<std::shared_mutex> guard(pieces_lock);
        pieces.remove(ptr);
    }
    if (cudaHostUnregister(ptr) != cudaSuccess) {
        (void) cudaGetLastError();
    }
}

cudaError_t phase_cuda_copy_in(void * dst, const void * src, size_t size, cudaStream_t stream) {
    std::shared_lock<std::shared_mutex> guard(pieces_lock);
    size_t done = 0;
    do {
        const auto * from = (const char *) src + done;
        const size_t n    = pieces.run(from, size - done);
        const cudaError_t error = cudaMemcpyAsync((char *) dst + done, from, n, cudaMemcpyHostToDevice, stream);
        if (error != cudaSuccess) {
            return error;
        }
        done += n;
    } while (done < size);
    return cudaSuccess;
}
