/* NVML, as far as oomguard asks it, for a machine without GPUs. The folder $SIMULATED_GPUS says what there is, and may change at any time:
 *
 *   devices     gpu UUID BYTES NAME [lost] [mig] [nosizes] [noprocesses] [held=BYTES]     one line a GPU; _ stands for a blank in NAME
 *               mig UUID BYTES INDEX NAME                                                an instance of the GPU above it
 *               fails CALL CODE                                                          init, count: an error of NVML by its number
 *   use.PID     UUID BYTES       what a process holds; it counts for as long as the process lives
 */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 64
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, LOST = 15, MISMATCH = 18 };
typedef unsigned long long bytes_t;
typedef struct { bytes_t total, free, used; } memory_t;
typedef struct { unsigned pid; bytes_t used; unsigned gpu, compute; } process_t;
typedef struct { int gpu, index, lost, mig, nosizes, noprocesses; char uuid[96], name[96]; bytes_t total, held; } device_t;
typedef struct { unsigned pid; char uuid[96]; bytes_t bytes; } use_t;

static char handles[MOST]; /* the address of one stands for the line of the same number */
static device_t found[MOST];
static int lines, code_of_init, code_of_count;

static FILE *opened(const char *name) {
  char path[4096];
  const char *folder = getenv("SIMULATED_GPUS");
  snprintf(path, sizeof path, "%s/%s", folder ? folder : "/nonexistent", name);
  return fopen(path, "r");
}

static void look(void) {
  char line[1024], kind[16], word[96];
  int gpu = -1;
  FILE *file = opened("devices");
  lines = code_of_init = code_of_count = 0;
  if (!file) { code_of_init = NO_DRIVER; return; }
  while (lines < MOST && fgets(line, sizeof line, file)) {
    device_t *d = &found[lines];
    int at = 0, code;
    memset(d, 0, sizeof *d);
    if (sscanf(line, "fails %15s %d", kind, &code) == 2) {
      *(strcmp(kind, "init") ? &code_of_count : &code_of_init) = code;
    } else if (sscanf(line, "gpu %95s %llu %95s%n", d->uuid, &d->total, d->name, &at) == 3) {
      for (char *rest = line + at; sscanf(rest, " %95s%n", word, &at) == 1; rest += at) {
        d->lost |= !strcmp(word, "lost"), d->mig |= !strcmp(word, "mig");
        d->nosizes |= !strcmp(word, "nosizes"), d->noprocesses |= !strcmp(word, "noprocesses");
        sscanf(word, "held=%llu", &d->held);
      }
      d->gpu = gpu = lines++, d->index = -1;
    } else if (sscanf(line, "mig %95s %llu %d %95s", d->uuid, &d->total, &d->index, d->name) == 4) {
      d->gpu = gpu, lines++;
    }
    for (char *c = d->name; *c; c++) if (*c == '_') *c = ' ';
  }
  fclose(file);
}

static int uses(const device_t *of, use_t *into) {
  int count = 0;
  char name[300], line[256];
  DIR *folder = opendir(getenv("SIMULATED_GPUS"));
  for (struct dirent *entry; folder && (entry = readdir(folder));) {
    unsigned pid;
    use_t use;
    if (sscanf(entry->d_name, "use.%u", &pid) != 1 || kill((pid_t)pid, 0)) continue;
    snprintf(name, sizeof name, "use.%u", pid);
    FILE *file = opened(name);
    while (file && fgets(line, sizeof line, file))
      if (sscanf(line, "%95s %llu", use.uuid, &use.bytes) == 2 && !strcmp(use.uuid, of->uuid) && count < MOST)
        use.pid = pid, into[count++] = use;
    if (file) fclose(file);
  }
  if (folder) closedir(folder);
  return count;
}

static device_t *of(void *handle) {
  look();
  long line = (char *)handle - handles;
  return line >= 0 && line < lines ? &found[line] : NULL;
}

static int nth(int wanted, int gpu) { /* the line of a GPU, or of a GPU's instance */
  for (int line = 0, seen = 0; line < lines; line++)
    if (gpu < 0 ? found[line].index < 0 && seen++ == wanted : found[line].gpu == gpu && found[line].index == wanted) return line;
  return -1;
}

static int copied(char *into, unsigned size, const char *text) {
  if (strlen(text) >= size) return TOO_SMALL;
  strcpy(into, text);
  return OK;
}

const char *nvmlErrorString(int code) {
  switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NO_DRIVER: return "Driver Not Loaded";
    case LOST: return "GPU is lost";
    case MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}
int nvmlInitWithFlags(unsigned flags) { look(); return code_of_init; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return copied(text, size, "580.65.06"); }
int nvmlDeviceGetCount_v2(unsigned *count) {
  look();
  for (*count = 0; nth(*count, -1) >= 0;) ++*count;
  return code_of_count;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  look();
  int line = nth(index, -1);
  if (line < 0) return INVALID;
  *handle = &handles[line];
  return found[line].lost ? LOST : OK;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  device_t *d = of(handle);
  return d ? copied(text, size, d->uuid) : LOST;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  device_t *d = of(handle);
  return d ? copied(text, size, d->name) : LOST;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
  device_t *d = of(handle);
  if (!d) return LOST;
  *current = *pending = d->mig;
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
  device_t *d = of(handle);
  *count = d && d->mig ? 7 : 0;
  return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
  device_t *d = of(handle);
  int line = d ? nth(index, d->gpu) : -1;
  if (line < 0) return NOT_FOUND;
  *instance = &handles[line];
  return OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
  use_t held[MOST];
  device_t *d = of(handle);
  if (!d || d->lost) return LOST;
  if (d->nosizes) return NOT_SUPPORTED;
  memory->total = d->total, memory->used = d->held;
  for (int i = 0, n = uses(d, held); i < n; i++) memory->used += held[i].bytes;
  memory->free = memory->used < memory->total ? memory->total - memory->used : 0;
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *processes) {
  use_t held[MOST];
  device_t *d = of(handle);
  if (!d || d->lost) return LOST;
  if (d->noprocesses) return NOT_SUPPORTED;
  unsigned n = uses(d, held), room = *count;
  *count = n;
  if (!n) return OK;
  if (room < n || !processes) return TOO_SMALL;
  for (unsigned i = 0; i < n; i++) processes[i] = (process_t){held[i].pid, held[i].bytes, 0, 0};
  return OK;
}
