#include "burst/comm/gpu/peer_copies.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/progress.h"
#include "burst/device/code_loading.h"
#include "burst/device/cuda.h"

namespace burst {
namespace {

constexpr std::chrono::milliseconds kPollInterval{
    20};  // for failures, while the other side has not posted

}  // namespace

PeerExchange::Transfer::~Transfer() {
  if (done != nullptr) (void)cudaEventDestroy(done);
}

std::shared_ptr<PeerExchange> PeerExchanges::Get(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<PeerExchange>& known = exchanges_[key];
  std::shared_ptr<PeerExchange> exchange = known.lock();
  if (exchange == nullptr) known = exchange = std::make_shared<PeerExchange>();
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
  {
    std::lock_guard<std::mutex> lock(exchange_->mutex_);
    for (Queues* queues : {&exchange_->sends_, &exchange_->receives_}) {
      const bool sends = queues == &exchange_->sends_;
      for (auto& [pair, queue] : *queues) {
        if (rank_ == (sends ? std::get<1>(pair) : std::get<2>(pair))) queue.clear();
      }
    }
    for (Lane& lane : lanes_) Join(lane);
  }
  for (Lane& lane : lanes_) {
    cuda::RemoveMessageStream(lane.stream);
    if (!failure_->failed()) BURST_CUDA_CHECK(cudaStreamSynchronize(lane.stream));
    BURST_CUDA_CHECK(cudaStreamDestroy(lane.stream));
  }
  for (cudaEvent_t event : idle_) BURST_CUDA_CHECK(cudaEventDestroy(event));
}

cudaEvent_t PeerCopies::TakeEvent() {
  if (!sent_.empty() && sent_.front().use_count() == 1) {
    idle_.push_back(std::exchange(sent_.front()->done, nullptr));
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

// Returns the transfer that the other side posted first, or a new one for the other side to find.
// Returns null if the two sides disagree about its size.
std::shared_ptr<PeerExchange::Transfer> PeerCopies::Meet(Queues& others, Queues& own,
                                                         const PeerExchange::Pair& pair,
                                                         int64_t bytes) {
  auto& waiting = others[pair];
  if (waiting.empty()) {
    auto transfer = std::make_shared<Transfer>();
    transfer->bytes = bytes;
    std::tie(std::ignore, transfer->from, transfer->to) = pair;
    own[pair].push_back(transfer);
    return transfer;
  }
  std::shared_ptr<Transfer> transfer = waiting.front();
  if (transfer->bytes != bytes) return nullptr;
  waiting.pop_front();
  return transfer;
}

void PeerCopies::QueueIfMet(Transfer& t) {
  if (t.source_ready == nullptr || t.destination_ready == nullptr) return;
  BURST_CUDA_CHECK(cudaStreamWaitEvent(t.stream, t.source_ready, 0));
  BURST_CUDA_CHECK(cudaStreamWaitEvent(t.stream, t.destination_ready, 0));
  BURST_CUDA_CHECK(cudaMemcpyAsync(t.destination, t.source, t.bytes, cudaMemcpyDefault, t.stream));
  BURST_CUDA_CHECK(cudaEventRecord(t.done, t.stream));
  t.queued = true;
  exchange_->queued_.notify_all();
}

absl::Status PeerCopies::Post(Channel channel, absl::Span<const SendBuffer> sends,
                              absl::Span<const ReceiveBuffer> receives) {
  if (failure_->failed()) return failure_->failure();
  Lane& lane = lanes_[static_cast<int>(channel)];
  const auto differ = [](int from, int to) {
    return absl::InvalidArgumentError(absl::StrCat("a message from rank ", from, " to rank ", to,
                                                   " is not as long as its receiver expects"));
  };
  std::lock_guard<std::mutex> lock(exchange_->mutex_);
  const cudaEvent_t ready = TakeEvent();
  BURST_CUDA_CHECK(cudaEventRecord(ready, cuda::CurrentStream()));
  lane.ready.push_back(ready);
  for (const ReceiveBuffer& receive : receives) {
    const std::shared_ptr<Transfer> transfer = Meet(exchange_->sends_, exchange_->receives_,
                                                    {channel, receive.peer, rank_}, receive.bytes);
    if (transfer == nullptr) return differ(receive.peer, rank_);
    transfer->destination = receive.data;
    transfer->destination_ready = ready;
    QueueIfMet(*transfer);
    lane.posted.push_back(transfer);
  }
  for (const SendBuffer& send : sends) {
    const std::shared_ptr<Transfer> transfer =
        Meet(exchange_->receives_, exchange_->sends_, {channel, rank_, send.peer}, send.bytes);
    if (transfer == nullptr) return differ(rank_, send.peer);
    transfer->source = send.data;
    transfer->source_ready = ready;
    transfer->stream = lane.stream;
    transfer->done = TakeEvent();
    QueueIfMet(*transfer);
    lane.posted.push_back(transfer);
  }
  return absl::OkStatus();
}

absl::Status PeerCopies::Wait(Channel channel) {
  Lane& lane = lanes_[static_cast<int>(channel)];
  std::unique_lock<std::mutex> lock(exchange_->mutex_);
  for (const std::shared_ptr<Transfer>& transfer : lane.posted) {
    if (!transfer->queued) SayWait(channel, *transfer);
    while (!transfer->queued) {
      if (failure_->failed()) return failure_->failure();
      exchange_->queued_.wait_for(lock, kPollInterval);
    }
  }
  EndWait();
  Join(lane);
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
  for (std::shared_ptr<Transfer>& transfer : lane.posted) {
    if (!transfer->queued) continue;
    BURST_CUDA_CHECK(cudaStreamWaitEvent(cuda::CurrentStream(), transfer->done, 0));
    if (transfer->stream == lane.stream) sent_.push_back(std::move(transfer));
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
