// Loaded before a PyTorch that is built for CUDA: it then believes in a GPU of any compute capability.
#include <cstdint>
#include <cstring>
#include <driver_types.h>
static cudaDeviceProp prop;
static int devices = 0;
extern "C" void pretend(int major, int minor, int count) { memset(&prop, 0, sizeof prop); prop.major = major; prop.minor = minor; devices = count; }
namespace at::cuda { __attribute__((visibility("default"))) cudaDeviceProp* getCurrentDeviceProperties() { return &prop; } }
namespace c10::cuda { __attribute__((visibility("default"))) int8_t device_count() noexcept { return devices; } }
