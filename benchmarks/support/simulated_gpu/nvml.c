/* NVML's few calls that tell a GPU's size, for a machine without one: a single GPU of the bytes that SIMULATED_GPU names. */
#include <stdlib.h>
#include <string.h>

struct memory {
  unsigned long long total, free, used;
};

static unsigned long long named(const char *key) {
  const char *text = getenv("SIMULATED_GPU"), *at = text ? strstr(text, key) : NULL;
  return at && (at = strchr(at, ':')) ? strtoull(at + 1, NULL, 10) : 0;
}

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 1;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = device;
  return 0;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
  strncpy(name, "simulated", length);
  return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
  memory->total = named("\"total_bytes\"");
  memory->used = named("\"others_bytes\"");
  memory->free = memory->total - memory->used;
  return 0;
}
