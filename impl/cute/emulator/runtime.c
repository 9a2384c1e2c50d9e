// A stand-in for the CUDA runtime that the CuTe DSL's host code calls: there is one device, everything
// succeeds, and a launch goes to a callback. It is linked into every exported host function, so that
// no other library can take its place. Failures are CUDA's own numbers.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC visibility push(hidden)

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, NOT_READY_TO_LAUNCH = 98 };
enum { MAX_DYNAMIC_SHARED = 8 };                      // attribute of a function
enum { MAX_SHARED = 8, MAX_SHARED_OPTIN = 97 };       // attributes of a device
enum { SHARED_DEFAULT = 49152, SHARED_OPTIN = 232448, MAX_THREADS = 1024, MAX_GRID_YZ = 65535 };

typedef struct {
  int32_t id, padding;
  uint8_t value[64];
} attribute_t;

typedef struct {
  uint32_t grid[3], block[3];
  uint64_t shared;
  void *stream;
  const attribute_t *attributes;
  int32_t count;
} config_t;

typedef struct {
  char *name;
  int32_t shared;  // bytes of dynamic shared memory it may be launched with
} kernel_t;

// Gets the launch, the kernel's name and the addresses of its parameters; returns a CUDA error.
typedef int (*launch_t)(const config_t *, const char *, void **);
static launch_t on_launch;

__attribute__((visibility("default"))) void kdafuzz_on_launch(launch_t callback) { on_launch = callback; }

int _cudaLaunchKernelEx(const config_t *config, const kernel_t *kernel, void **params) {
  const uint32_t *grid = config->grid, *block = config->block;
  uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  if (!grid[0] || !grid[1] || !grid[2] || grid[1] > MAX_GRID_YZ || grid[2] > MAX_GRID_YZ) return INVALID_CONFIGURATION;
  if (!threads || threads > MAX_THREADS) return INVALID_CONFIGURATION;
  if (config->shared > (uint64_t)kernel->shared) return INVALID_VALUE;
  return on_launch ? on_launch(config, kernel->name, params) : NOT_READY_TO_LAUNCH;
}

int _cudaLaunchKernel(const kernel_t *kernel, int32_t gx, int32_t gy, int32_t gz, int32_t bx, int32_t by, int32_t bz,
                      void **params, int64_t shared, void *stream) {
  config_t config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, 0, 0};
  return _cudaLaunchKernelEx(&config, kernel, params);
}

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, int32_t c, void *d, void *e, int32_t f) {
  *library = (void *)code;
  return SUCCESS;
}

int _cudaLibraryUnload(void *library) { return SUCCESS; }

// Kernels live as long as the process: a library is loaded once.
int _cudaLibraryGetKernel(kernel_t **kernel, void *library, const char *name) {
  kernel_t *made = malloc(sizeof *made);
  if (!made || !(made->name = strdup(name))) return OUT_OF_MEMORY;
  made->shared = SHARED_DEFAULT;
  *kernel = made;
  return SUCCESS;
}

static int set_attribute(kernel_t *kernel, int32_t attribute, int32_t value) {
  if (attribute != MAX_DYNAMIC_SHARED) return SUCCESS;
  if (value < 0 || value > SHARED_OPTIN) return INVALID_VALUE;
  kernel->shared = value;
  return SUCCESS;
}

int _cudaKernelSetAttributeForDevice(kernel_t *kernel, int32_t attribute, int32_t value, int32_t device) {
  return set_attribute(kernel, attribute, value);
}

int _cudaFuncSetAttribute(kernel_t *kernel, int32_t attribute, int32_t value) {
  return set_attribute(kernel, attribute, value);
}

// Asked for the static shared memory: the DSL's kernels have dynamic shared memory only.
int _cuKernelGetAttribute(int32_t *value, int32_t attribute, const kernel_t *kernel, int32_t device) {
  *value = 0;
  return SUCCESS;
}

int _cudaDeviceGetAttribute(int32_t *value, int32_t attribute, int32_t device) {
  if (attribute != MAX_SHARED && attribute != MAX_SHARED_OPTIN) return INVALID_VALUE;
  *value = attribute == MAX_SHARED ? SHARED_DEFAULT : SHARED_OPTIN;
  return SUCCESS;
}

int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int32_t *blocks, const kernel_t *kernel, int32_t threads,
                                                   int64_t shared) {
  *blocks = 1;
  return SUCCESS;
}

int _cudaGetDevice(int32_t *device) {
  *device = 0;
  return SUCCESS;
}

int _cudaGetDeviceCount(int32_t *count) {
  *count = 1;
  return SUCCESS;
}

int _cudaSetDevice(int32_t device) { return device ? INVALID_VALUE : SUCCESS; }

typedef int (*init_t)(void **);
typedef int (*load_t)(void **, int32_t);

// Loads the code image once and its kernels on the one device; state stays null until then.
int cuda_dialect_init_library_once(void **state, init_t init, load_t load, void *set_error) {
  if (*state) return SUCCESS;
  int code = init(state);
  return code ? code : load(state, 0);
}

void cuda_dialect_unload_library_once(void **state) { *state = 0; }

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) __attribute__((visibility("default")));

static const char *text(int32_t code) {
  switch (code) {
    case INVALID_VALUE:
      return "the launch needs more dynamic shared memory than a block may have (CUDA error 1)";
    case INVALID_CONFIGURATION:
      return "the launch has an empty or too large grid or block (CUDA error 9)";
    case NOT_READY_TO_LAUNCH:
      return "a launch outside of a call of the emulator (CUDA error 98)";
    default:
      return "the CUDA call failed on the emulator";
  }
}

void CuteDSLRT_TVMFFISetRaisedCudaError(void *where, int32_t code) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text(code));
}
