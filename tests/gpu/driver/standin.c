/* A simulated CUDA driver for tests: libcuda's exported names over memory descriptors of the host,
   and those of HIP's runtime over the same.

   No device, no kernels. What is real here: every process has its own mapping of an allocation,
   reached through a file descriptor; copies may cross allocations that are mapped one behind the
   other; a range without access rights faults; calls that need a context fail without one; sizes
   must be multiples of the granularity; the work of a stream runs late, in order, on a thread of
   its own; events order streams, also of different processes.

   The checker: each stream carries a vector clock, events and waits join clocks, and writes on
   streams leave theirs with the allocation. A copy to the host that no event orders after every
   earlier write, but those of processes that have ended, delivers POISON instead of the bytes.
   Stores by the processor, such as those of torch's CPU kernels, are no work of a stream, and are
   not checked.

   Environment:
     PARAMD_STANDIN_DIR      where the processes of one device meet; required
     PARAMD_STANDIN_LATE_US  how late each work of a stream begins
     PARAMD_STANDIN_FAIL     "cuMemCreate=2,cuMemMap=801": calls that fail, and their codes
     PARAMD_STANDIN_LIMITS   "vmm", "fd": device attributes that are 0
     PARAMD_STANDIN_HIP_VERSION  which version of HIP it is, by itself 70200000 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
       INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600,
       NOT_SUPPORTED = 801 };
enum { GRANULARITY = 2 << 20, STREAMS = 512, EVENTS = 256, ALLOCATIONS = 256, POISON = 0xDB };
enum { TOTAL_BYTES = 1 << 30 };

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; uint64_t flags; } Prop;
typedef struct { Location location; int flags; } Access;

typedef struct { uint64_t at[STREAMS]; } Clock;
typedef struct { int used, stream; uint64_t number; Clock clock; } Event;
typedef struct { uint64_t device, inode; uint64_t bytes; Clock written; } Allocation;

/* What all processes of one device share. Guarded by flock, which the kernel gives back when a
   process is killed; `done` is written by one stream's thread alone. */
typedef struct {
  int streams, allocations, contexts, locked;
  uint64_t unordered;
  volatile uint64_t done[STREAMS];
  int process[STREAMS]; /* whose stream it is */
  Event events[EVENTS];
  Allocation all[ALLOCATIONS];
} Shared;

/* Where which allocation is mapped in this process. */
typedef struct { uint64_t begin, end; int allocation; } Mapped;
static Mapped mapped[ALLOCATIONS];
static int mapped_count;

static Shared *shared;
static int shared_fd = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int primary_count;
static __thread void *current;
static char failing[512];

static void lock(void) {
  pthread_mutex_lock(&mutex);
  while (flock(shared_fd, LOCK_EX)) ;
}

static void unlock(void) {
  flock(shared_fd, LOCK_UN);
  pthread_mutex_unlock(&mutex);
}

static int number_after(const char *text, const char *name) {
  size_t size = strlen(name);
  for (const char *at = text; at && (at = strstr(at, name)); at += size)
    if ((at == text || at[-1] == ',') && at[size] == '=') return atoi(at + size + 1);
  return 0;
}

static CUresult asked_to_fail(const char *name) {
  int code = number_after(failing, name);
  const char *told = getenv("PARAMD_STANDIN_FAIL");
  return code ? code : told ? number_after(told, name) : 0;
}

static int limited(const char *what) {
  const char *told = getenv("PARAMD_STANDIN_LIMITS");
  return told && strstr(told, what);
}

#define ENTER(name) do { CUresult asked = asked_to_fail(#name); if (asked) return asked; \
  if (!shared) return NOT_INITIALIZED; } while (0)
#define IN_CONTEXT() do { if (!current) return INVALID_CONTEXT; } while (0)

/* Only the stand-in has these: by the first the binding knows that it is one. */
static int capturing;
void paramd_standin_capture(int now) { capturing = now; }
int paramd_standin(void) { return 1; }
void paramd_standin_fail(const char *what) { snprintf(failing, sizeof failing, "%s", what); }
uint64_t paramd_standin_unordered(void) { return shared ? shared->unordered : 0; }
int paramd_standin_allocations(void) { return shared ? shared->allocations : 0; }
int paramd_standin_contexts(void) { return shared ? shared->contexts : 0; }

CUresult cuInit(unsigned flags) {
  CUresult asked = asked_to_fail("cuInit");
  const char *folder = getenv("PARAMD_STANDIN_DIR");
  char path[4096];
  if (asked) return asked;
  if (flags) return INVALID_VALUE;
  if (shared) return OK;
  if (!folder) return NO_DEVICE;
  snprintf(path, sizeof path, "%s/standin-device", folder);
  shared_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (shared_fd < 0 || ftruncate(shared_fd, sizeof(Shared))) return NO_DEVICE;
  void *found = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, shared_fd, 0);
  if (found == MAP_FAILED) return NO_DEVICE;
  shared = found;
  return OK;
}

CUresult cuGetErrorName(CUresult code, const char **name) {
  static const struct { int code; const char *name; } known[] = {
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_READY, "CUDA_ERROR_NOT_READY"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"}, {800, "CUDA_ERROR_NOT_PERMITTED"},
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].code == code) { *name = known[i].name; return OK; }
  *name = 0;
  return INVALID_VALUE;
}

CUresult cuDeviceGetCount(int *count) { ENTER(cuDeviceGetCount); *count = 1; return OK; }

CUresult cuDeviceGet(int *device, int ordinal) {
  ENTER(cuDeviceGet);
  if (ordinal) return INVALID_DEVICE;
  *device = 0;
  return OK;
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  ENTER(cuDeviceGetUuid_v2);
  if (device) return INVALID_DEVICE;
  memcpy(uuid, "simulated device", 16);
  return OK;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER(cuDeviceGetAttribute);
  if (device) return INVALID_DEVICE;
  *value = attribute == 102 ? !limited("vmm") : attribute == 103 ? !limited("fd") : 0;
  return OK;
}

/* Contexts. The primary one is counted once a process, however often it is retained. */

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
  ENTER(cuDevicePrimaryCtxRetain);
  if (device) return INVALID_DEVICE;
  lock();
  if (!primary_count++) shared->contexts++;
  unlock();
  *context = &primary_count;
  return OK;
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER(cuDevicePrimaryCtxRelease_v2);
  if (device || !primary_count) return INVALID_CONTEXT;
  lock();
  if (!--primary_count) shared->contexts--;
  unlock();
  return OK;
}

CUresult cuCtxGetCurrent(void **context) { ENTER(cuCtxGetCurrent); *context = current; return OK; }

CUresult cuCtxSetCurrent(void *context) {
  ENTER(cuCtxSetCurrent);
  if (context && (context != &primary_count || !primary_count)) return INVALID_CONTEXT;
  current = context;
  return OK;
}

/* Memory: a handle is a descriptor, numbered from 1. None of these calls needs a context. */

CUresult cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
  ENTER(cuMemGetAllocationGranularity);
  if (prop->location.id || option > 1) return INVALID_VALUE;
  *size = GRANULARITY;
  return OK;
}

CUresult cuMemCreate(uint64_t *handle, size_t size, const Prop *prop, unsigned long long flags) {
  ENTER(cuMemCreate);
  if (!size || size % GRANULARITY || flags || prop->type != 1 || prop->location.type != 1)
    return INVALID_VALUE;
  if (prop->location.id) return INVALID_DEVICE;
  if (size > TOTAL_BYTES) return OUT_OF_MEMORY;
  int fd = memfd_create("simulated-device", MFD_CLOEXEC);
  struct stat found;
  if (fd < 0 || ftruncate(fd, size) || fstat(fd, &found)) return OUT_OF_MEMORY;
  lock();
  int full = shared->allocations == ALLOCATIONS;
  if (!full) {
    Allocation *made = &shared->all[shared->allocations++];
    made->device = found.st_dev, made->inode = found.st_ino, made->bytes = size;
  }
  unlock();
  if (full) { close(fd); return OUT_OF_MEMORY; }
  *handle = fd + 1;
  return OK;
}

CUresult cuMemRelease(uint64_t handle) {
  ENTER(cuMemRelease);
  return handle && !close(handle - 1) ? OK : INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags) {
  ENTER(cuMemExportToShareableHandle);
  if (type != 1 || flags || !handle) return INVALID_VALUE;
  int fd = fcntl(handle - 1, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return INVALID_HANDLE;
  *(int *)out = fd;
  return OK;
}

CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type) {
  ENTER(cuMemImportFromShareableHandle);
  if (type != 1) return INVALID_VALUE;
  struct stat found;
  int fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0), known = 0;
  if (fd < 0 || fstat(fd, &found)) return INVALID_VALUE;
  lock();
  for (int i = 0; i < shared->allocations; i++)
    known |= shared->all[i].inode == found.st_ino && shared->all[i].device == found.st_dev;
  unlock();
  if (!known) { close(fd); return INVALID_VALUE; }
  *handle = fd + 1;
  return OK;
}

static int allocation_of(int fd) {
  struct stat found;
  if (fstat(fd, &found)) return -1;
  for (int i = 0; i < shared->allocations; i++)
    if (shared->all[i].inode == found.st_ino && shared->all[i].device == found.st_dev) return i;
  return -1;
}

/* The allocations in which [begin, begin + size) lies, one behind the other; how many, and 0 if
   some of it is not mapped. */
static int allocations_at(uint64_t begin, size_t size, int *found) {
  uint64_t end = begin + size;
  int count = 0;
  for (int i = 0; i < mapped_count && begin < end;) {
    if (mapped[i].begin <= begin && begin < mapped[i].end) {
      found[count++] = mapped[i].allocation, begin = mapped[i].end;
      i = 0;
    } else {
      i++;
    }
  }
  return begin < end ? 0 : count;
}

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
  ENTER(cuMemAddressReserve);
  (void)address;
  if (!size || size % GRANULARITY || flags || alignment > GRANULARITY) return INVALID_VALUE;
  uint64_t found = (uint64_t)mmap(0, size + GRANULARITY, PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == (uint64_t)MAP_FAILED) return OUT_OF_MEMORY;
  uint64_t begin = (found + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (begin > found) munmap((void *)found, begin - found);
  munmap((void *)(begin + size), found + GRANULARITY - begin);
  *at = begin;
  return OK;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  ENTER(cuMemAddressFree);
  return munmap((void *)at, size) ? INVALID_VALUE : OK;
}

CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
  ENTER(cuMemMap);
  if (!handle || at % GRANULARITY || size % GRANULARITY || offset || flags) return INVALID_VALUE;
  struct stat found;
  if (fstat(handle - 1, &found) || (uint64_t)found.st_size < size) return INVALID_VALUE;
  /* Over a reservation alone: MAP_FIXED elsewhere would destroy what lies there. */
  void *made = mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle - 1, 0);
  if (made == MAP_FAILED) return INVALID_VALUE;
  lock();
  if (mapped_count == ALLOCATIONS) { unlock(); return OUT_OF_MEMORY; }
  mapped[mapped_count++] = (Mapped){at, at + size, allocation_of(handle - 1)};
  unlock();
  return OK;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const Access *access, size_t count) {
  ENTER(cuMemSetAccess);
  if (count != 1 || access->location.type != 1 || access->location.id) return INVALID_VALUE;
  int how = access->flags == 3 ? PROT_READ | PROT_WRITE : access->flags == 1 ? PROT_READ : PROT_NONE;
  return mprotect((void *)at, size, how) ? INVALID_VALUE : OK;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  ENTER(cuMemUnmap);
  int found = 0;
  lock();
  for (int i = 0; i < mapped_count; i++)
    if (mapped[i].begin == at && mapped[i].end == at + size) {
      mapped[i] = mapped[--mapped_count];
      found = 1;
      break;
    }
  unlock();
  if (!found) return INVALID_VALUE;
  mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return OK;
}

CUresult cuMemAllocHost_v2(void **out, size_t size) {
  ENTER(cuMemAllocHost_v2);
  IN_CONTEXT();
  *out = malloc(size);
  return *out ? OK : OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void *memory) { ENTER(cuMemFreeHost); free(memory); return OK; }

/* Memory of the host that was page-locked, by its first byte. Only counted. */
CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
  ENTER(cuMemHostRegister_v2);
  IN_CONTEXT();
  if (!memory || !size || flags) return INVALID_VALUE;
  lock();
  shared->locked++;
  unlock();
  return OK;
}

CUresult cuMemHostUnregister(void *memory) {
  ENTER(cuMemHostUnregister);
  IN_CONTEXT();
  if (!memory) return INVALID_VALUE;
  lock();
  shared->locked--;
  unlock();
  return OK;
}

int paramd_standin_locked(void) { return shared ? shared->locked : 0; }

/* Streams: works in a queue, done late and in order by a thread of the stream's own. */

typedef struct Work {
  struct Work *next;
  void *target;
  const void *source;
  size_t size;
  uint32_t value;
  int kind, awaited;
  uint64_t awaited_number;
} Work;
enum { COPY, FILL, SPOIL, AWAIT, NOTHING };

typedef struct {
  int id, closing;
  uint64_t queued;
  Clock clock;
  Work *first, *last;
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
} Stream;
static Stream *null_stream;

static void perform(Stream *stream, const Work *work) {
  const char *late = getenv("PARAMD_STANDIN_LATE_US");
  if (work->kind == AWAIT) {
    while (shared->done[work->awaited] < work->awaited_number && !stream->closing) usleep(50);
    return;
  }
  if (late && work->kind != NOTHING) usleep(atoi(late));
  if (work->kind == COPY) memcpy(work->target, work->source, work->size);
  if (work->kind == SPOIL) memset(work->target, POISON, work->size);
  if (work->kind == FILL)
    for (size_t i = 0; i < work->size; i++) ((uint32_t *)work->target)[i] = work->value;
}

static void *run(void *argument) {
  Stream *stream = argument;
  pthread_mutex_lock(&stream->mutex);
  for (;;) {
    while (!stream->first && !stream->closing) pthread_cond_wait(&stream->changed, &stream->mutex);
    Work *work = stream->first;
    if (!work) break;
    pthread_mutex_unlock(&stream->mutex);
    perform(stream, work);
    pthread_mutex_lock(&stream->mutex);
    stream->first = work->next;
    if (!stream->first) stream->last = 0;
    free(work);
    __atomic_add_fetch(&shared->done[stream->id], 1, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&stream->changed);
  }
  pthread_mutex_unlock(&stream->mutex);
  return 0;
}

static Stream *new_stream(void) {
  Stream *made = calloc(1, sizeof *made);
  lock();
  made->id = shared->streams < STREAMS ? shared->streams++ : -1;
  if (made->id >= 0) shared->process[made->id] = getpid();
  unlock();
  if (made->id < 0) { free(made); return 0; }
  pthread_mutex_init(&made->mutex, 0);
  pthread_cond_init(&made->changed, 0);
  if (pthread_create(&made->thread, 0, run, made)) { free(made); return 0; }
  return made;
}

static Stream *stream_of(void *stream) {
  static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
  if (stream) return stream;
  pthread_mutex_lock(&making);
  if (!null_stream) null_stream = new_stream();
  pthread_mutex_unlock(&making);
  return null_stream;
}

/* Queue a copy of `work`; its number on the stream. With the lock of `shared` held. */
static uint64_t queue(Stream *stream, Work work) {
  Work *made = malloc(sizeof *made);
  *made = work, made->next = 0;
  pthread_mutex_lock(&stream->mutex);
  if (stream->last) stream->last->next = made; else stream->first = made;
  stream->last = made;
  stream->clock.at[stream->id] = ++stream->queued;
  pthread_cond_broadcast(&stream->changed);
  uint64_t number = stream->queued;
  pthread_mutex_unlock(&stream->mutex);
  return number;
}

CUresult cuStreamCreate(void **out, unsigned flags) {
  ENTER(cuStreamCreate);
  IN_CONTEXT();
  if (flags > 1) return INVALID_VALUE;
  *out = new_stream();
  return *out ? OK : OUT_OF_MEMORY;
}

CUresult cuStreamSynchronize(void *given) {
  ENTER(cuStreamSynchronize);
  IN_CONTEXT();
  Stream *stream = stream_of(given);
  pthread_mutex_lock(&stream->mutex);
  while (stream->first) pthread_cond_wait(&stream->changed, &stream->mutex);
  pthread_mutex_unlock(&stream->mutex);
  return OK;
}

CUresult cuStreamIsCapturing(void *stream, int *status) {
  ENTER(cuStreamIsCapturing);
  (void)stream;
  *status = capturing;
  return OK;
}

CUresult cuStreamDestroy_v2(void *given) {
  ENTER(cuStreamDestroy_v2);
  Stream *stream = given;
  if (!stream) return INVALID_HANDLE;
  pthread_mutex_lock(&stream->mutex);
  stream->closing = 1;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->mutex);
  pthread_join(stream->thread, 0);
  free(stream);
  return OK;
}

/* Let go of the device, so that a test may begin with another. */
void paramd_standin_close(void) {
  if (!shared) return;
  if (null_stream) cuStreamDestroy_v2(null_stream);
  null_stream = 0;
  munmap(shared, sizeof *shared);
  close(shared_fd);
  shared = 0, shared_fd = -1, current = 0, primary_count = 0, mapped_count = 0, failing[0] = 0, capturing = 0;
}

static CUresult write_to(Stream *stream, uint64_t begin, size_t bytes, Work work) {
  if (!stream) return OUT_OF_MEMORY;
  int at[ALLOCATIONS];
  lock();
  int count = allocations_at(begin, bytes, at);
  uint64_t number = count ? queue(stream, work) : 0;
  for (int i = 0; i < count; i++) shared->all[at[i]].written.at[stream->id] = number;
  unlock();
  return count ? OK : INVALID_VALUE;
}

CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t count, void *stream) {
  ENTER(cuMemsetD32Async);
  IN_CONTEXT();
  Work work = {.kind = FILL, .target = (void *)at, .size = count, .value = value};
  return write_to(stream_of(stream), at, 4 * count, work);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr at, const void *source, size_t size, void *stream) {
  ENTER(cuMemcpyHtoDAsync_v2);
  IN_CONTEXT();
  Work work = {.kind = COPY, .target = (void *)at, .source = source, .size = size};
  return write_to(stream_of(stream), at, size, work);
}

/* Whether a process has ended, reaped or not: then its queue has, and nothing of it is awaited. */
static int has_ended(int process) {
  char path[64], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 1;
  ssize_t size = read(fd, text, sizeof text - 1);
  close(fd);
  if (size <= 0) return 1;
  text[size] = 0;
  const char *state = strrchr(text, ')');
  return state && (state[2] == 'Z' || state[2] == 'X');
}

CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr at, size_t size, void *given) {
  ENTER(cuMemcpyDtoHAsync_v2);
  IN_CONTEXT();
  Stream *stream = stream_of(given);
  if (!stream) return OUT_OF_MEMORY;
  int found[ALLOCATIONS], ordered = 1;
  lock();
  int count = allocations_at(at, size, found);
  if (count) {
    for (int i = 0; i < count * shared->streams && ordered; i++) {
      const Clock *written = &shared->all[found[i / shared->streams]].written;
      int other = i % shared->streams;
      ordered = written->at[other] <= stream->clock.at[other] || has_ended(shared->process[other]);
    }
    if (!ordered) shared->unordered++;
    Work work = {.kind = ordered ? COPY : SPOIL, .target = target, .source = (void *)at, .size = size};
    queue(stream, work);
  }
  unlock();
  return count ? OK : INVALID_VALUE;
}

/* Events: what was queued on a stream when one was recorded. All are fit for other processes. */

typedef struct { char folder[32]; int number; char rest[28]; } Handle;

CUresult cuEventCreate(void **event, unsigned flags) {
  ENTER(cuEventCreate);
  IN_CONTEXT();
  if ((flags & 4) && !(flags & 2)) return INVALID_VALUE;
  lock();
  int at = 0;
  while (at < EVENTS && shared->events[at].used) at++;
  if (at < EVENTS) {
    memset(&shared->events[at], 0, sizeof(Event));
    shared->events[at].used = 1;
  }
  unlock();
  *event = (void *)(intptr_t)(at + 1);
  return at < EVENTS ? OK : OUT_OF_MEMORY;
}

static Event *event_of(void *event) {
  intptr_t at = (intptr_t)event - 1;
  return at >= 0 && at < EVENTS && shared->events[at].used ? &shared->events[at] : 0;
}

CUresult cuEventDestroy_v2(void *event) {
  ENTER(cuEventDestroy_v2);
  return event_of(event) ? OK : INVALID_HANDLE;
}

CUresult cuIpcGetEventHandle(Handle *handle, void *event) {
  ENTER(cuIpcGetEventHandle);
  if (!event_of(event)) return INVALID_HANDLE;
  memset(handle, 0, sizeof *handle);
  handle->number = (int)(intptr_t)event;
  return OK;
}

CUresult cuIpcOpenEventHandle(void **event, Handle handle) {
  ENTER(cuIpcOpenEventHandle);
  IN_CONTEXT();
  *event = (void *)(intptr_t)handle.number;
  return event_of(*event) ? OK : INVALID_VALUE;
}

CUresult cuEventRecord(void *given, void *on) {
  ENTER(cuEventRecord);
  IN_CONTEXT();
  Event *event = event_of(given);
  Stream *stream = stream_of(on);
  if (!event || !stream) return INVALID_HANDLE;
  lock();
  event->number = queue(stream, (Work){.kind = NOTHING});
  event->stream = stream->id, event->clock = stream->clock;
  unlock();
  return OK;
}

CUresult cuEventQuery(void *given) {
  ENTER(cuEventQuery);
  Event *event = event_of(given);
  if (!event) return INVALID_HANDLE;
  lock();
  int done = shared->done[event->stream] >= event->number;
  unlock();
  return done ? OK : NOT_READY;
}

CUresult cuStreamWaitEvent(void *given, void *on, unsigned flags) {
  ENTER(cuStreamWaitEvent);
  IN_CONTEXT();
  Event *event = event_of(on);
  Stream *stream = stream_of(given);
  if (!event || !stream || flags) return INVALID_HANDLE;
  lock();
  Work work = {.kind = AWAIT, .awaited = event->stream, .awaited_number = event->number};
  for (int i = 0; i < STREAMS; i++)
    if (event->clock.at[i] > stream->clock.at[i]) stream->clock.at[i] = event->clock.at[i];
  queue(stream, work);
  unlock();
  return OK;
}

/* HIP's names for the same device, with HIP's structures; what HIP does otherwise is written out.
   A thread has a current device from the start, the first. The second one is there to be in the way:
   while it is current, nothing works but what goes by a handle or an address. */

typedef int hipError_t;
typedef struct { unsigned char compression_type, gpu_direct_rdma_capable; unsigned short usage; } hipAllocFlags;
typedef struct { int type, id; } hipMemLocation;
typedef struct {
  int type, requested_handle_type;
  hipMemLocation location;
  void *win32_handle_meta_data;
  hipAllocFlags alloc_flags;
} hipMemAllocationProp;
typedef struct { hipMemLocation location; int flags; } hipMemAccessDesc;
typedef struct { char bytes[16]; } hipUUID;
typedef struct { char reserved[64]; } hipIpcEventHandle_t;
_Static_assert(sizeof(hipMemAllocationProp) == sizeof(Prop), "as CUDA's");
_Static_assert(sizeof(hipMemAccessDesc) == sizeof(Access), "as CUDA's");
_Static_assert(sizeof(hipIpcEventHandle_t) == sizeof(Handle), "as CUDA's");
enum { HIP_DEVICES = 2, BY_VALUE_SINCE = 70100000, HIP_VIRTUAL_MEMORY = 89 };

static __thread int hip_device;
#define HERE() do { \
  if (hip_device) return INVALID_DEVICE; \
  if (shared) current = &primary_count; } while (0)
#define HIP(name, cuda, declared, passed) \
  hipError_t name declared { HERE(); return cuda passed; }
#define ANYWHERE(name, cuda, declared, passed) \
  hipError_t name declared { return cuda passed; }

static int hip_version(void) {
  const char *told = getenv("PARAMD_STANDIN_HIP_VERSION");
  return told ? atoi(told) : 70200000;
}

/* The runtime opens its devices at once. */
hipError_t hipInit(unsigned flags) {
  hipError_t code = cuInit(flags);
  void *context;
  return code || primary_count ? code : cuDevicePrimaryCtxRetain(&context, 0);
}

hipError_t hipRuntimeGetVersion(int *version) { *version = hip_version(); return OK; }
hipError_t hipDrvGetErrorName(int code, const char **name) { return cuGetErrorName(code, name); }
hipError_t hipGetDeviceCount(int *count) { *count = HIP_DEVICES; return OK; }
hipError_t hipGetDevice(int *device) { *device = hip_device; return OK; }

hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= HIP_DEVICES) return INVALID_DEVICE;
  hip_device = device;
  return OK;
}

hipError_t hipDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= HIP_DEVICES) return INVALID_DEVICE;
  *device = ordinal;
  return OK;
}

hipError_t hipDeviceGetUuid(hipUUID *uuid, int device) {
  memcpy(uuid->bytes, device ? "in everyones way" : "simulated device", sizeof uuid->bytes);
  return OK;
}

hipError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
  if (device < 0 || device >= HIP_DEVICES) return INVALID_DEVICE;
  *value = attribute == HIP_VIRTUAL_MEMORY && !limited("vmm");
  return OK;
}

static Prop prop_of(const hipMemAllocationProp *given) {
  return (Prop){given->type, given->requested_handle_type, {given->location.type, given->location.id},
                given->win32_handle_meta_data, 0};
}

hipError_t hipMemGetAllocationGranularity(size_t *size, const hipMemAllocationProp *given, int option) {
  HERE();
  Prop prop = prop_of(given);
  return cuMemGetAllocationGranularity(size, &prop, option);
}

hipError_t hipMemCreate(uint64_t *handle, size_t size, const hipMemAllocationProp *given,
                        unsigned long long flags) {
  HERE();
  if (given->requested_handle_type != 1) return NOT_SUPPORTED;
  Prop prop = prop_of(given);
  return cuMemCreate(handle, size, &prop, flags);
}

hipError_t hipMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type) {
  HERE();
  if (!os_handle) return INVALID_VALUE;
  intptr_t fd = hip_version() < BY_VALUE_SINCE ? *(int *)os_handle : (intptr_t)os_handle;
  return cuMemImportFromShareableHandle(handle, (void *)fd, type);
}

hipError_t hipMemSetAccess(void *at, size_t size, const hipMemAccessDesc *given, size_t count) {
  Access access = {{given->location.type, given->location.id}, given->flags};
  return cuMemSetAccess((CUdeviceptr)at, size, &access, count);
}

hipError_t hipIpcOpenEventHandle(void **event, hipIpcEventHandle_t given) {
  HERE();
  Handle handle;
  memcpy(&handle, &given, sizeof handle);
  return cuIpcOpenEventHandle(event, handle);
}

hipError_t hipHostMalloc(void **out, size_t size, unsigned flags) {
  HERE();
  return flags ? INVALID_VALUE : cuMemAllocHost_v2(out, size);
}

ANYWHERE(hipHostFree, cuMemFreeHost, (void *memory), (memory))
HIP(hipHostRegister, cuMemHostRegister_v2, (void *memory, size_t size, unsigned flags),
    (memory, size, flags))
HIP(hipHostUnregister, cuMemHostUnregister, (void *memory), (memory))
ANYWHERE(hipMemRelease, cuMemRelease, (uint64_t handle), (handle))
ANYWHERE(hipMemExportToShareableHandle, cuMemExportToShareableHandle,
    (void *out, uint64_t handle, int type, unsigned long long flags), (out, handle, type, flags))
ANYWHERE(hipMemAddressReserve, cuMemAddressReserve,
    (void **at, size_t size, size_t alignment, void *address, unsigned long long flags),
    ((CUdeviceptr *)at, size, alignment, (CUdeviceptr)address, flags))
ANYWHERE(hipMemAddressFree, cuMemAddressFree, (void *at, size_t size), ((CUdeviceptr)at, size))
ANYWHERE(hipMemMap, cuMemMap,
    (void *at, size_t size, size_t offset, uint64_t handle, unsigned long long flags),
    ((CUdeviceptr)at, size, offset, handle, flags))
ANYWHERE(hipMemUnmap, cuMemUnmap, (void *at, size_t size), ((CUdeviceptr)at, size))
HIP(hipMemsetD32Async, cuMemsetD32Async, (void *at, int value, size_t count, void *stream),
    ((CUdeviceptr)at, value, count, stream))
HIP(hipMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void *target, void *at, size_t size, void *stream),
    (target, (CUdeviceptr)at, size, stream))
HIP(hipMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (void *at, void *source, size_t size, void *stream),
    ((CUdeviceptr)at, source, size, stream))
HIP(hipStreamCreateWithFlags, cuStreamCreate, (void **stream, unsigned flags), (stream, flags))
ANYWHERE(hipStreamDestroy, cuStreamDestroy_v2, (void *stream), (stream))
HIP(hipStreamSynchronize, cuStreamSynchronize, (void *stream), (stream))
HIP(hipStreamIsCapturing, cuStreamIsCapturing, (void *stream, int *status), (stream, status))
HIP(hipStreamWaitEvent, cuStreamWaitEvent, (void *stream, void *event, unsigned flags),
    (stream, event, flags))
HIP(hipEventCreateWithFlags, cuEventCreate, (void **event, unsigned flags), (event, flags))
ANYWHERE(hipEventDestroy, cuEventDestroy_v2, (void *event), (event))
HIP(hipEventRecord, cuEventRecord, (void *event, void *stream), (event, stream))
ANYWHERE(hipEventQuery, cuEventQuery, (void *event), (event))
HIP(hipIpcGetEventHandle, cuIpcGetEventHandle, (hipIpcEventHandle_t *handle, void *event),
    ((Handle *)handle, event))
