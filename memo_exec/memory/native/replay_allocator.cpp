// An allocator for torch.cuda.memory.CUDAPluggableAllocator. It can do three things:
// - record the requests of a step;
// - serve the requests of a step from one arena: the n-th request gets the n-th planned offset;
// - serve requests from memory that a caller lends it.
//
// It serves a single stream. Slots are reused without waiting, which is safe only in the order of one stream, and
// requests of several threads have no fixed order. A request goes to the device's allocator, and is counted, in these
// cases: it comes from another stream, its size differs from the plan, the plan has no request left, its slot is still
// taken, or it does not fit into the lent memory.
//
// It needs no CUDA headers: cudaMalloc and cudaFree are looked up at first use. Tests use host memory instead
// (memo_use_host_memory). Only memo_torch_malloc throws (std::bad_alloc): torch turns that into a Python error, but
// would use a null pointer as it is.

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <cstdint>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kAlignment = 512;
constexpr int64_t kNone = -1;
constexpr int kBadPlan = 3, kInUse = 2, kNoMemory = 1, kDone = 0;

struct Slot {
  int64_t offset;
  int64_t size;
};

struct Event {
  int64_t request;
  int64_t size;  // kNone: the request is freed
};

struct Block {
  int64_t size;
  int64_t request;  // kNone: the request is not recorded
};

enum Count {
  kReplayed, kLent, kOtherSize, kBeyondPlan, kSlotTaken, kNoRoom, kOtherStream, kFallbackBytes, kUnknownFree, kCounts
};

std::mutex guard;
bool host_memory = false;
bool recording = false;
bool replaying = false;
void* served = nullptr;  // the one stream that is recorded or served
int64_t next_request = 0;
int64_t counts[kCounts] = {};
// Never destroyed, because torch frees memory until the process ends.
auto& plan = *new std::vector<Slot>;
auto& events = *new std::vector<Event>;
auto& blocks = *new std::unordered_map<void*, Block>;  // living blocks of the device's allocator
auto& taken = *new std::map<int64_t, int64_t>;         // offset -> size of living slots in the arena
auto& cut = *new std::map<char*, int64_t>;             // address -> size of living pieces of lent memory
char* arena = nullptr;
int64_t arena_bytes = 0;
char* lent = nullptr;
int64_t lent_bytes = 0;

void* cuda_symbol(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  // Prefer the runtime that torch has loaded; any other would be a second CUDA runtime in this process.
  for (int how : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const char* library : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
      if (void* handle = dlopen(library, how)) {
        if (void* found = dlsym(handle, name)) return found;
      }
    }
  }
  return nullptr;
}

void* backend_malloc(int64_t size) {
  if (host_memory) {
    void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? nullptr : found;
  }
  static const auto cuda_malloc = reinterpret_cast<int (*)(void**, size_t)>(cuda_symbol("cudaMalloc"));
  void* found = nullptr;
  return cuda_malloc && cuda_malloc(&found, size) == 0 ? found : nullptr;
}

void backend_free(void* pointer, int64_t size) {
  if (host_memory) {
    munmap(pointer, size);
    return;
  }
  static const auto cuda_free = reinterpret_cast<int (*)(void*)>(cuda_symbol("cudaFree"));
  if (cuda_free) cuda_free(pointer);
}

void drop_arena_if_idle() {
  if (replaying || !taken.empty() || !arena) return;
  backend_free(arena, arena_bytes);
  arena = nullptr;
  arena_bytes = 0;
}

bool is_free(const Slot& slot) {
  auto after = taken.lower_bound(slot.offset);
  if (after != taken.end() && after->first < slot.offset + slot.size) return false;
  return after == taken.begin() || std::prev(after)->first + std::prev(after)->second <= slot.offset;
}

// Returns the planned address of this request. If it has none, counts the reason and returns null.
void* planned(int64_t request, int64_t size) {
  if (request >= static_cast<int64_t>(plan.size())) {
    ++counts[kBeyondPlan];
    return nullptr;
  }
  const Slot& slot = plan[request];
  if (slot.size != size) {
    ++counts[kOtherSize];
    return nullptr;
  }
  if (!is_free(slot)) {
    ++counts[kSlotTaken];
    return nullptr;
  }
  taken[slot.offset] = size;
  ++counts[kReplayed];
  return arena + slot.offset;
}

// Returns the address after the last living piece of the lent memory. If there is no room, counts it and returns null.
void* cut_from_lent(int64_t size) {
  char* start = lent;
  auto behind = cut.lower_bound(lent + lent_bytes);
  if (behind != cut.begin()) {
    auto last = std::prev(behind);
    if (last->first >= lent) {
      const int64_t used = last->first + last->second - lent;
      start = lent + (used + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  if (size > lent + lent_bytes - start) {
    ++counts[kNoRoom];
    return nullptr;
  }
  cut[start] = size;
  ++counts[kLent];
  return start;
}

void* served_request(int64_t size) {
  if (lent) return cut_from_lent(size);
  if (replaying) return planned(next_request++, size);
  return nullptr;
}

void* allocate(int64_t size, void* stream) {
  if (size <= 0) return nullptr;
  {
    std::lock_guard<std::mutex> lock(guard);
    if (replaying || lent) {
      if (stream == served) {
        if (void* found = served_request(size)) return found;
      } else if (replaying) {
        ++counts[kOtherStream];
      }
    }
  }
  void* found = backend_malloc(size);  // outside the lock, because the device may have to finish its work first
  if (!found) return nullptr;
  std::lock_guard<std::mutex> lock(guard);
  try {
    Block block{size, kNone};
    if (recording && stream == served) {
      events.push_back({next_request, size});
      block.request = next_request++;
    }
    blocks[found] = block;
  } catch (const std::bad_alloc&) {
    backend_free(found, size);
    return nullptr;
  }
  if (replaying || (lent && stream == served)) counts[kFallbackBytes] += size;
  return found;
}

// Removes a pointer from the tables; returns its block if the device's allocator must free it.
Block forget(void* pointer) {
  std::lock_guard<std::mutex> lock(guard);
  char* address = static_cast<char*>(pointer);
  if (auto block = blocks.find(pointer); block != blocks.end()) {
    Block found = block->second;
    blocks.erase(block);
    if (recording && found.request != kNone) events.push_back({found.request, kNone});
    return found;
  }
  if (cut.erase(address)) return {0, kNone};
  if (arena && address >= arena && address < arena + arena_bytes && taken.erase(address - arena)) {
    drop_arena_if_idle();
    return {0, kNone};
  }
  ++counts[kUnknownFree];
  return {0, kNone};
}

}  // namespace

extern "C" {

// Uses host memory instead of device memory from now on; returns 0, or 2 if memory was already handed out.
int memo_use_host_memory() {
  std::lock_guard<std::mutex> lock(guard);
  if (!host_memory && (!blocks.empty() || arena)) return kInUse;
  host_memory = true;
  return kDone;
}

void* memo_malloc(ssize_t size, int, void* stream) try {
  return allocate(size, stream);
} catch (const std::exception&) {
  return nullptr;
}

// The entry point for torch.
void* memo_torch_malloc(ssize_t size, int, void* stream) {
  void* found = allocate(size, stream);
  if (!found && size > 0) throw std::bad_alloc();
  return found;
}

// Frees a pointer. The size comes from the request, not from the caller. An unknown pointer is only counted.
void memo_free(void* pointer, ssize_t, int, void*) try {
  if (!pointer) return;
  if (Block block = forget(pointer); block.size) backend_free(pointer, block.size);
} catch (const std::exception&) {
}

// Records the requests of a stream from now on, numbered from 0; `on` = 0 stops. Living blocks get no number.
void memo_record(int on, void* stream) {
  std::lock_guard<std::mutex> lock(guard);
  recording = on != 0;
  if (!recording) return;
  events.clear();
  for (auto& block : blocks) block.second.request = kNone;
  served = stream;
  next_request = 0;
}

// Allocates an arena and serves a stream from it. Returns 0, 1 if there is no memory, 2 if an earlier arena is in use,
// or 3 if a slot lies outside the arena.
int memo_replay(const int64_t* offsets, const int64_t* sizes, int64_t count, int64_t bytes, void* stream) try {
  std::lock_guard<std::mutex> lock(guard);
  for (int64_t i = 0; i < count; ++i) {
    if (offsets[i] < 0 || sizes[i] < 0 || sizes[i] > bytes - offsets[i]) return kBadPlan;
  }
  if (!taken.empty()) return kInUse;
  replaying = false;
  drop_arena_if_idle();
  plan.clear();
  for (int64_t i = 0; i < count; ++i) plan.push_back({offsets[i], sizes[i]});
  for (int64_t& each : counts) each = 0;
  next_request = 0;
  served = stream;
  if (bytes > 0) {
    arena = static_cast<char*>(backend_malloc(bytes));
    if (!arena) return kNoMemory;
  }
  arena_bytes = bytes;
  replaying = true;
  return kDone;
} catch (const std::exception&) {
  return kNoMemory;
}

// Starts a step: requests count from 0 again. Living requests keep their slots.
void memo_begin_step() {
  std::lock_guard<std::mutex> lock(guard);
  next_request = 0;
}

// Serves a stream from this memory until a call with a null pointer. Requests that live in it after that stay valid as
// long as the lender does not reuse the memory.
void memo_lend(void* pointer, int64_t bytes, void* stream) {
  std::lock_guard<std::mutex> lock(guard);
  lent = static_cast<char*>(pointer);
  lent_bytes = bytes;
  if (lent) served = stream;
}

// Returns to the device's allocator; the arena is freed once no request lives in it.
void memo_stop() {
  std::lock_guard<std::mutex> lock(guard);
  replaying = false;
  drop_arena_if_idle();
}

int64_t memo_event_count() {
  std::lock_guard<std::mutex> lock(guard);
  return static_cast<int64_t>(events.size());
}

// Copies up to `most` recorded events as pairs (request, size or -1); returns their number.
int64_t memo_events(int64_t* out, int64_t most) {
  std::lock_guard<std::mutex> lock(guard);
  int64_t count = 0;
  for (; count < most && count < static_cast<int64_t>(events.size()); ++count) {
    out[2 * count] = events[count].request;
    out[2 * count + 1] = events[count].size;
  }
  return count;
}

void memo_reset_counts() {
  std::lock_guard<std::mutex> lock(guard);
  for (int64_t& each : counts) each = 0;
}

void memo_counts(int64_t* out) {
  std::lock_guard<std::mutex> lock(guard);
  for (int i = 0; i < kCounts; ++i) out[i] = counts[i];
}

int64_t memo_arena() {
  std::lock_guard<std::mutex> lock(guard);
  return reinterpret_cast<int64_t>(arena);
}

// Returns the number of living blocks of the device's allocator.
int64_t memo_living() {
  std::lock_guard<std::mutex> lock(guard);
  return static_cast<int64_t>(blocks.size());
}

}  // extern "C"
