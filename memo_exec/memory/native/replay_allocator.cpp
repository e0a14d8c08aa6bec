// An allocator for torch.cuda.memory.CUDAPluggableAllocator that records the requests of a step, or serves them from
// one arena at planned offsets, request by request in the order of the plan.
//
// A request that is not the planned one (another size, none left, a slot still taken) goes to the fallback allocator and
// is counted. So does a request of a second stream: slots are reused without waiting, which is right in one stream's order
// alone. Needs no CUDA headers: cudaMalloc and cudaFree are looked up at run time; MEMO_REPLAY_HOST=1 takes host
// memory instead, so that the logic can be tested without a GPU.

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using CudaMalloc = int (*)(void**, size_t);
using CudaFree = int (*)(void*);

struct Slot {
  int64_t offset;
  int64_t size;
};

struct Event {
  int64_t request;
  int64_t size;  // -1: the request is given back
};

enum Count { kReplayed, kOtherSize, kBeyondPlan, kSlotTaken, kOtherStream, kFallbackBytes, kUnknownFree, kCounts };

std::mutex guard;
std::vector<Slot> plan;
std::vector<Event> events;
std::map<int64_t, int64_t> taken;                // offset -> end, of living slots
std::unordered_map<void*, int64_t> requests;     // pointer -> number of its request, while recording
int64_t next_request = 0;
int64_t counts[kCounts] = {};
bool recording = false;
bool replaying = false;
char* arena = nullptr;
int64_t arena_bytes = 0;
void* replayed_stream = nullptr;
bool stream_known = false;

bool on_host() { return std::getenv("MEMO_REPLAY_HOST") != nullptr; }

void* cuda_symbol(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  for (const char* library : {"libcudart.so", "libcudart.so.13", "libcudart.so.12"}) {
    if (void* handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL)) {
      if (void* found = dlsym(handle, name)) return found;
    }
  }
  return nullptr;
}

void* backend_malloc(int64_t size) {
  if (size <= 0) return nullptr;
  if (on_host()) {
    void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? nullptr : found;
  }
  static auto cuda_malloc = reinterpret_cast<CudaMalloc>(cuda_symbol("cudaMalloc"));
  void* found = nullptr;
  return cuda_malloc && cuda_malloc(&found, size) == 0 ? found : nullptr;
}

void backend_free(void* pointer, int64_t size) {
  if (!pointer) return;
  if (on_host()) {
    munmap(pointer, size);
    return;
  }
  static auto cuda_free = reinterpret_cast<CudaFree>(cuda_symbol("cudaFree"));
  if (cuda_free) cuda_free(pointer);
}

bool is_free(const Slot& slot) {
  auto after = taken.lower_bound(slot.offset);
  if (after != taken.end() && after->first < slot.offset + slot.size) return false;
  return after == taken.begin() || std::prev(after)->second <= slot.offset;
}

// Returns the planned address of this request, or null after counting why there is none.
void* planned(int64_t request, int64_t size, void* stream) {
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
  if (stream_known && stream != replayed_stream) {
    ++counts[kOtherStream];
    return nullptr;
  }
  replayed_stream = stream;
  stream_known = true;
  taken[slot.offset] = slot.offset + slot.size;
  ++counts[kReplayed];
  return arena + slot.offset;
}

bool in_arena(void* pointer) {
  return arena && static_cast<char*>(pointer) >= arena && static_cast<char*>(pointer) < arena + arena_bytes;
}

}  // namespace

extern "C" {

void* memo_malloc(ssize_t size, int, void* stream) {
  std::lock_guard<std::mutex> lock(guard);
  if (size <= 0) return nullptr;
  const int64_t request = next_request++;
  void* found = replaying ? planned(request, size, stream) : nullptr;
  if (!found) {
    found = backend_malloc(size);
    if (replaying && found) counts[kFallbackBytes] += size;
  }
  if (recording && found) {
    events.push_back({request, size});
    requests[found] = request;
  }
  return found;
}

void memo_free(void* pointer, ssize_t size, int, void*) {
  std::lock_guard<std::mutex> lock(guard);
  if (!pointer) return;
  if (recording) {
    auto known = requests.find(pointer);
    if (known != requests.end()) {
      events.push_back({known->second, -1});
      requests.erase(known);
    }
  }
  if (!in_arena(pointer)) {
    backend_free(pointer, size);
  } else if (!taken.erase(static_cast<char*>(pointer) - arena)) {
    ++counts[kUnknownFree];
  }
}

// Starts a step: requests count from 0 again. What still lives keeps its slot.
void memo_begin_step() {
  std::lock_guard<std::mutex> lock(guard);
  next_request = 0;
}

void memo_record(int on) {
  std::lock_guard<std::mutex> lock(guard);
  recording = on != 0;
  if (recording) {
    events.clear();
    requests.clear();
    next_request = 0;
  }
}

// Takes the arena and serves requests from it; returns 0, or 1 without memory, or 2 while slots are in use.
int memo_replay(const int64_t* offsets, const int64_t* sizes, int64_t count, int64_t bytes) {
  std::lock_guard<std::mutex> lock(guard);
  if (!taken.empty()) return 2;
  backend_free(arena, arena_bytes);
  plan.clear();
  for (int64_t i = 0; i < count; ++i) plan.push_back({offsets[i], sizes[i]});
  for (int64_t& each : counts) each = 0;
  next_request = 0;
  stream_known = false;
  arena_bytes = bytes;
  arena = static_cast<char*>(backend_malloc(bytes));
  replaying = arena != nullptr;
  return arena || bytes == 0 ? 0 : 1;
}

// Goes back to the fallback; what lives in the arena stays valid, and so does the arena.
void memo_stop() {
  std::lock_guard<std::mutex> lock(guard);
  replaying = false;
}

int64_t memo_event_count() {
  std::lock_guard<std::mutex> lock(guard);
  return static_cast<int64_t>(events.size());
}

// Copies the recorded events as pairs (request, size or -1).
void memo_events(int64_t* out) {
  std::lock_guard<std::mutex> lock(guard);
  for (size_t i = 0; i < events.size(); ++i) {
    out[2 * i] = events[i].request;
    out[2 * i + 1] = events[i].size;
  }
}

void memo_counts(int64_t* out) {
  std::lock_guard<std::mutex> lock(guard);
  for (int i = 0; i < kCounts; ++i) out[i] = counts[i];
}

int64_t memo_arena() { return reinterpret_cast<int64_t>(arena); }

}  // extern "C"
