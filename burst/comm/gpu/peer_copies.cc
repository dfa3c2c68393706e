#include "burst/comm/gpu/peer_copies.h"

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/device/code_loading.h"
#include "burst/device/cuda.h"

namespace burst {
namespace {

// How long a rank looks for the other side's Post before its thread sleeps. Ranks that do the same
// work post within this time, and waking a thread takes longer than all calls of a Post.
constexpr std::chrono::microseconds kSpinTime{200};
constexpr std::chrono::milliseconds kPollInterval{20};  // for failures, while the thread sleeps

absl::Status LengthsDiffer(int from, int to) {
  return absl::InvalidArgumentError(absl::StrCat("a message from rank ", from, " to rank ", to,
                                                 " is not as long as its receiver expects"));
}

// Calls function(run) for each run of messages with the same peer, until one fails.
template <typename Buffer, typename Function>
absl::Status ForEachPeer(absl::Span<const Buffer> messages, Function function) {
  while (!messages.empty()) {
    size_t size = 1;
    while (size < messages.size() && messages[size].peer == messages[0].peer) ++size;
    BURST_RETURN_IF_ERROR(function(messages.first(size)));
    messages.remove_prefix(size);
  }
  return absl::OkStatus();
}

}  // namespace

PeerExchange::Done::~Done() {
  if (event != nullptr) (void)cudaEventDestroy(event);
}

// Returns the transfer that the other side posted first, or a new one for the other side to find.
// Returns null if the two sides disagree about its size. The lock of the box is held.
std::shared_ptr<PeerExchange::Transfer> PeerExchange::Meet(Transfers& others, Transfers& own,
                                                           int from, int to, int64_t bytes) {
  if (others.empty()) {
    own.push_back(std::make_shared<Transfer>(from, to, bytes));
    return own.back();
  }
  if (others.front()->bytes != bytes) return nullptr;
  std::shared_ptr<Transfer> transfer = std::move(others.front());
  others.pop_front();
  return transfer;
}

std::shared_ptr<PeerExchange> PeerExchanges::Get(const std::string& key, int world_size) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<PeerExchange>& known = exchanges_[key];
  std::shared_ptr<PeerExchange> exchange = known.lock();
  if (exchange == nullptr) known = exchange = std::make_shared<PeerExchange>(world_size);
  return exchange;
}

PeerCopies::PeerCopies(std::shared_ptr<PeerExchange> exchange, const FailureState* failure,
                       int rank, std::vector<int> world_ranks)
    : exchange_(std::move(exchange)),
      failure_(failure),
      rank_(rank),
      world_ranks_(std::move(world_ranks)) {
  for (Lane& lane : lanes_) {
    BURST_CUDA_CHECK(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
    cuda::AddMessageStream(lane.stream);
  }
}

PeerCopies::~PeerCopies() {
  const auto withdraw = [](Box& box, PeerExchange::Transfers& own) {
    std::lock_guard<std::mutex> lock(box.mutex);
    own.clear();
  };
  for (int c = 0; c < kNumChannels; ++c) {
    for (int peer = 0; peer < static_cast<int>(world_ranks_.size()); ++peer) {
      Box& out = exchange_->box(static_cast<Channel>(c), rank_, peer);
      Box& in = exchange_->box(static_cast<Channel>(c), peer, rank_);
      withdraw(out, out.sends);
      withdraw(in, in.receives);
    }
  }
  for (Lane& lane : lanes_) Join(lane);
  for (Lane& lane : lanes_) {
    cuda::RemoveMessageStream(lane.stream);
    if (!failure_->failed()) BURST_CUDA_CHECK(cudaStreamSynchronize(lane.stream));
    BURST_CUDA_CHECK(cudaStreamDestroy(lane.stream));
  }
  for (cudaEvent_t event : idle_) BURST_CUDA_CHECK(cudaEventDestroy(event));
}

cudaEvent_t PeerCopies::TakeEvent() {
  if (!sent_.empty() && sent_.front().use_count() == 1) {
    // The receiver's last use of the event comes before its next use here.
    std::atomic_thread_fence(std::memory_order_acquire);
    idle_.push_back(std::exchange(sent_.front()->event, nullptr));
    sent_.pop_front();
  }
  cudaEvent_t event = nullptr;
  if (idle_.empty()) {
    BURST_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  } else {
    event = idle_.back();
    idle_.pop_back();
  }
  return event;
}

// Queues copies that both sides have posted. The lock of the box is held.
void PeerCopies::Queue(Box& box, absl::Span<const std::shared_ptr<Transfer>> met) {
  cudaEvent_t source_ready = nullptr, destination_ready = nullptr;
  for (const std::shared_ptr<Transfer>& t : met) {
    if (std::exchange(source_ready, t->source_ready) != t->source_ready) {
      BURST_CUDA_CHECK(cudaStreamWaitEvent(t->stream, t->source_ready, 0));
    }
    if (std::exchange(destination_ready, t->destination_ready) != t->destination_ready) {
      BURST_CUDA_CHECK(cudaStreamWaitEvent(t->stream, t->destination_ready, 0));
    }
    BURST_CUDA_CHECK(
        cudaMemcpyAsync(t->destination, t->source, t->bytes, cudaMemcpyDefault, t->stream));
  }
  const Done* recorded = nullptr;
  for (const std::shared_ptr<Transfer>& t : met) {
    if (std::exchange(recorded, t->done.get()) != t->done.get()) {
      BURST_CUDA_CHECK(cudaEventRecord(t->done->event, t->stream));
    }
    t->queued.store(true, std::memory_order_release);
  }
  if (!met.empty()) box.queued.notify_all();
}

absl::Status PeerCopies::Post(Channel channel, absl::Span<const SendBuffer> sends,
                              absl::Span<const ReceiveBuffer> receives) {
  if (failure_->failed()) return failure_->failure();
  Lane& lane = this->lane(channel);
  const cudaEvent_t ready = TakeEvent();
  BURST_CUDA_CHECK(cudaEventRecord(ready, cuda::CurrentStream()));
  lane.ready.push_back(ready);
  std::vector<std::shared_ptr<Transfer>> met;
  BURST_RETURN_IF_ERROR(ForEachPeer(receives, [&](absl::Span<const ReceiveBuffer> run) {
    const int from = run[0].peer;
    Box& box = exchange_->box(channel, from, rank_);
    std::lock_guard<std::mutex> lock(box.mutex);
    met.clear();
    for (const ReceiveBuffer& receive : run) {
      const auto transfer = PeerExchange::Meet(box.sends, box.receives, from, rank_, receive.bytes);
      if (transfer == nullptr) return LengthsDiffer(from, rank_);
      transfer->destination = receive.data;
      transfer->destination_ready = ready;
      lane.posted.push_back(transfer);
      if (transfer->source_ready != nullptr) met.push_back(transfer);
    }
    Queue(box, met);
    return absl::OkStatus();
  }));
  return ForEachPeer(sends, [&](absl::Span<const SendBuffer> run) {
    const int to = run[0].peer;
    Box& box = exchange_->box(channel, rank_, to);
    const auto done = std::make_shared<Done>(TakeEvent());
    std::lock_guard<std::mutex> lock(box.mutex);
    met.clear();
    for (const SendBuffer& send : run) {
      const auto transfer = PeerExchange::Meet(box.receives, box.sends, rank_, to, send.bytes);
      if (transfer == nullptr) return LengthsDiffer(rank_, to);
      transfer->source = send.data;
      transfer->source_ready = ready;
      transfer->stream = lane.stream;
      transfer->done = done;
      lane.posted.push_back(transfer);
      if (transfer->destination_ready != nullptr) met.push_back(transfer);
    }
    Queue(box, met);
    return absl::OkStatus();
  });
}

absl::Status PeerCopies::Wait(Channel channel) {
  Lane& lane = this->lane(channel);
  for (const std::shared_ptr<Transfer>& transfer : lane.posted) {
    BURST_RETURN_IF_ERROR(WaitUntilQueued(channel, *transfer));
  }
  EndWait();
  Join(lane);
  return absl::OkStatus();
}

absl::Status PeerCopies::WaitUntilQueued(Channel channel, const Transfer& transfer) {
  const auto queued = [&] { return transfer.queued.load(std::memory_order_acquire); };
  if (queued()) return absl::OkStatus();
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  while (std::chrono::steady_clock::now() < end) {
    if (queued()) return absl::OkStatus();
    std::this_thread::yield();
  }
  SayWait(channel, transfer);
  Box& box = exchange_->box(channel, transfer.from, transfer.to);
  std::unique_lock<std::mutex> lock(box.mutex);
  while (!queued()) {
    if (failure_->failed()) return failure_->failure();
    box.queued.wait_for(lock, kPollInterval);
  }
  return absl::OkStatus();
}

// Tells the watchdog what the rank waits for.
void PeerCopies::SayWait(Channel channel, const Transfer& transfer) const {
  if (current_progress == nullptr) return;
  const bool sends = transfer.from == rank_;
  current_progress->Wait(sends ? "sends" : "receives", Name(channel),
                         world_ranks_[sends ? transfer.to : transfer.from], transfer.bytes);
}

void PeerCopies::Join(Lane& lane) {
  const Done* last = nullptr;
  for (const std::shared_ptr<Transfer>& transfer : lane.posted) {
    if (!transfer->queued.load(std::memory_order_acquire)) continue;
    if (std::exchange(last, transfer->done.get()) == transfer->done.get()) continue;
    BURST_CUDA_CHECK(cudaStreamWaitEvent(cuda::CurrentStream(), transfer->done->event, 0));
    if (transfer->from == rank_) sent_.push_back(transfer->done);
  }
  lane.posted.clear();
  idle_.insert(idle_.end(), lane.ready.begin(), lane.ready.end());
  lane.ready.clear();
}

bool CanCopyBetween(absl::Span<const int> gpus) {
  for (int reader : gpus) {
    for (int owner : gpus) {
      int can_access = 0;
      if (reader == owner) continue;
      BURST_CUDA_CHECK(cudaDeviceCanAccessPeer(&can_access, reader, owner));
      if (!can_access) return false;
    }
  }
  return true;
}

}  // namespace burst
