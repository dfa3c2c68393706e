#include "burst/comm/gpu/gpu_rank.h"

#include <unistd.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/comm/message_time.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "burst/device/code_loading.h"
#include "burst/device/device.h"

namespace burst {
namespace {

// The order of the NCCL links' ids. Reductions use the collective channel's link; the other
// channels have links only where NCCL carries messages too.
constexpr Channel kLinkOrder[kNumChannels] = {Channel::kCollective, Channel::kRead,
                                              Channel::kGradient};

// The channels of a link that carries a ring's blocks among more than two ranks; NCCL has no more.
// A message has one rank's share of its link's channels. NCCL's own choice is 32, so a message of
// four ranks has 8, which carry 150 GB/s, and short forwards wait. 32 more take 1 GB of a GPU.
constexpr int kBlockChannels = 64;

ncclDataType_t NcclType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kInt32:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  BURST_CHECK(false) << "cannot reduce " << Name(dtype);
  return ncclNumTypes;
}

// Returns a number that identifies the calling thread's GPU among the GPUs of all hosts.
double GpuNumber() {
  cudaDeviceProp properties;
  BURST_CUDA_CHECK(cudaGetDeviceProperties(&properties, cuda::CurrentContext().device));
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&](unsigned char c) { hash = (hash ^ c) * 0x100000001b3; };
  for (const char c : properties.uuid.bytes) add(c);
  for (const char* c = host; *c != '\0'; ++c) add(*c);
  return static_cast<double>(hash >> 12);
}

absl::Status CheckGpusDiffer(Communicator& host) {
  BURST_ASSIGN_OR_RETURN(const std::vector<double> gpus, host.AllGather(GpuNumber()));
  for (auto gpu = gpus.begin(); gpu != gpus.end(); ++gpu) {
    const auto first = std::find(gpus.begin(), gpu, *gpu);
    if (first == gpu) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("ranks ", first - gpus.begin(), " and ", gpu - gpus.begin(),
                     " use the same GPU, and NCCL needs one GPU for each rank"));
  }
  return absl::OkStatus();
}

template <typename Buffer>
void SplitByDevice(absl::Span<const Buffer> all, std::vector<Buffer>& host,
                   std::vector<Buffer>& gpu) {
  host.clear();
  gpu.clear();
  for (const Buffer& buffer : all) {
    (buffer.device == DeviceType::kCpu ? host : gpu).push_back(buffer);
  }
}

// Moves the buffers that `taken` is true for to another list, and keeps the order.
template <typename Buffer, typename Predicate>
void Take(std::vector<Buffer>& all, std::vector<Buffer>& to, const Predicate& taken) {
  to.clear();
  const auto rest = [&](const Buffer& buffer) { return !taken(buffer); };
  const auto end = std::stable_partition(all.begin(), all.end(), rest);
  to.assign(end, all.end());
  all.erase(end, all.end());
}

// Checks that a rank that sends to itself receives the same number of messages of the same lengths
// in the same Post.
absl::Status CheckOwn(int rank, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) {
  size_t r = 0;
  for (const SendBuffer& send : sends) {
    if (send.peer != rank) continue;
    while (r < receives.size() && receives[r].peer != rank) ++r;
    if (r == receives.size() || receives[r].bytes != send.bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " sends itself ", send.bytes,
                       " bytes of GPU memory and does not receive them in the same Post"));
    }
    ++r;
  }
  while (r < receives.size() && receives[r].peer != rank) ++r;
  if (r == receives.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, " receives ", receives[r].bytes,
                   " bytes of GPU memory from itself and does not send them in the same Post"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuCommunicator>> GpuCommunicator::Create(Communicator* host,
                                                                         GpuWorld* world) {
  std::unique_ptr<GpuCommunicator> communicator(new GpuCommunicator(host, world));
  if (host->world_size() == 1) return communicator;
  std::array<ncclUniqueId, kNumChannels> ids;
  if (host->rank() == 0) {
    for (ncclUniqueId& id : ids) {
      const ncclResult_t result = ncclGetUniqueId(&id);
      if (result != ncclSuccess) return NcclError("ncclGetUniqueId", result);
    }
  }
  BURST_RETURN_IF_ERROR(host->Broadcast(ids.data(), sizeof(ids), 0));
  BURST_RETURN_IF_ERROR(communicator->Connect(ids));
  return communicator;
}

absl::Status GpuCommunicator::Connect(absl::Span<const ncclUniqueId> ids) {
  BURST_ASSIGN_OR_RETURN(const std::vector<double> gpus, host_->AllGather(device_));
  if (world_->in_threads && CanCopyBetween(std::vector<int>(gpus.begin(), gpus.end()))) {
    auto exchange =
        world_->exchanges.Get(std::string(ids[0].internal, sizeof(ids[0].internal)), world_size());
    std::vector<int> world_ranks(world_size());
    for (int r = 0; r < world_size(); ++r) world_ranks[r] = WorldRank(r);
    copies_ = std::make_unique<PeerCopies>(std::move(exchange), &world_->failure, rank(),
                                           std::move(world_ranks));
    ids = ids.first(1);
  }
  std::vector<NcclLinkPlan> plans;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool carries_blocks = kLinkOrder[i] == Channel::kRead && world_size() > 2;
    plans.push_back({ids[i], carries_blocks ? kBlockChannels : 0});
  }
  BURST_ASSIGN_OR_RETURN(auto links, NcclLink::Create(&world_->links, world_size(), plans, rank()));
  for (size_t i = 0; i < links.size(); ++i) lane(kLinkOrder[i]).link = std::move(links[i]);
  if (copies_ != nullptr) return absl::OkStatus();
  BURST_RETURN_IF_ERROR(ConnectRing());
  if (world_->has_mail) {
    BURST_ASSIGN_OR_RETURN(mail_, PeerMail::Create(host_, &world_->mails));
  }
  return absl::OkStatus();
}

// Connects each rank by first messages to the peers that a ring uses. NCCL connects other peers
// when a message first uses them; that Post waits until the peer posts too. So does the first
// reduction.
absl::Status GpuCommunicator::ConnectRing() {
  const int size = world_size();
  const Tensor out = Tensor::Zeros({1}, DType::kFloat32, DeviceType::kCuda);
  for (Channel channel : {Channel::kRead, Channel::kGradient}) {
    const std::set<int> distances = RingDistances(size, channel);
    const Tensor in =
        Tensor::Zeros({static_cast<int64_t>(distances.size())}, DType::kFloat32, DeviceType::kCuda);
    std::vector<SendBuffer> sends;
    std::vector<ReceiveBuffer> receives;
    for (int distance : distances) {
      float* const place = static_cast<float*>(in.raw_data()) + receives.size();
      sends.push_back({out.raw_data(), 4, (rank() + distance) % size, DeviceType::kCuda});
      receives.push_back({place, 4, (rank() + size - distance) % size, DeviceType::kCuda});
    }
    BURST_RETURN_IF_ERROR(Post(channel, sends, receives));
    BURST_RETURN_IF_ERROR(Wait(channel));
  }
  ResetStats();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GpuCommunicator>> GpuCommunicator::Create(
    const HostConnector& connect, bool ends_process) {
  auto world = std::make_unique<GpuWorld>(/*in_threads=*/false, ends_process);
  TcpOptions options;
  options.ends_process = ends_process;
  options.on_failure = [world = world.get()](const absl::Status& failure) {
    world->watchdog.Fail(failure);
  };
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host, connect(options));
  BURST_RETURN_IF_ERROR(CheckGpusDiffer(*host));
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<GpuCommunicator> communicator,
                         Create(host.get(), world.get()));
  communicator->owned_world_ = std::move(world);
  communicator->owned_host_ = std::move(host);
  return communicator;
}

// The memory of messages that nobody waited for may be freed next. So its stream waits for the
// messages here.
GpuCommunicator::~GpuCommunicator() {
  copies_ = nullptr;
  mail_ = nullptr;
  for (Lane& lane : lanes_) {
    if (lane.stream == nullptr) continue;
    if (lane.posted && !world_->failure.failed()) Join(lane);
    if (!world_->failure.failed())
      cuda::CheckAtEnd("cudaStreamSynchronize", cudaStreamSynchronize(lane.stream));
    lane.link = nullptr;
    lane.marks = nullptr;
    cuda::RemoveMessageStream(lane.stream);
    cuda::CheckAtEnd("cudaEventDestroy", cudaEventDestroy(lane.done));
    cuda::CheckAtEnd("cudaStreamDestroy", cudaStreamDestroy(lane.stream));
  }
}

// Orders the lane after the thread's stream: work queued on the lane from now on starts after all
// work that is on the thread's stream.
absl::Status GpuCommunicator::Begin(Lane& lane) {
  if (world_->failure.failed()) return world_->failure.failure();
  const cuda::Context& context = cuda::CurrentContext();
  BURST_CHECK_EQ(context.device, device_) << "the GPU of the thread that uses a communicator";
  if (lane.stream == nullptr) {
    // NCCL's stream has the highest priority: its thread blocks start before the blocks of other
    // kernels that run at the same time.
    int least = 0, greatest = 0;
    BURST_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    BURST_CUDA_CHECK(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, greatest));
    BURST_CUDA_CHECK(cudaEventCreateWithFlags(&lane.done, cudaEventDisableTiming));
    lane.marks = std::make_unique<MessageMarks>(Name(static_cast<Channel>(&lane - &lanes_[0])));
    cuda::AddMessageStream(lane.stream);
  }
  BURST_CUDA_CHECK(cudaEventRecord(context.event, context.stream));
  BURST_CUDA_CHECK(cudaStreamWaitEvent(lane.stream, context.event, 0));
  lane.posted = true;
  return absl::OkStatus();
}

// Orders the thread's stream after the lane: work queued on the thread's stream from now on starts
// after all work that is on the lane.
void GpuCommunicator::Join(Lane& lane) {
  BURST_CUDA_CHECK(cudaEventRecord(lane.done, lane.stream));
  BURST_CUDA_CHECK(cudaStreamWaitEvent(cuda::CurrentStream(), lane.done, 0));
  lane.posted = false;
}

// The caller may free its messages' buffers after this, because the thread's stream waits for the
// messages. The messages end, because all ranks abort their links.
void GpuCommunicator::Abort(const absl::Status& reason) {
  host_->Abort(reason);
  if (world_->in_threads) return;
  for (int c = 0; c < kNumChannels; ++c) {
    const auto channel = static_cast<Channel>(c);
    try {
      if (lane(channel).posted) Join(lane(channel));
      if (mail_ != nullptr) mail_->Join(channel);
    } catch (const FatalError&) {  // the GPU itself has failed
    }
  }
}

// Calls NCCL, which connects a peer at its first message, and then waits for the peer here.
template <typename Function>
absl::Status GpuCommunicator::Group(Lane& lane, const char* what, int peer, int64_t bytes,
                                    Function&& function) {
  const ScopedWait wait(what, Name(static_cast<Channel>(&lane - &lanes_[0])), peer, bytes);
  const absl::Status status = lane.link->Group(what, std::forward<Function>(function));
  lane.marks->Queued(lane.stream, what, peer, bytes);
  return status;
}

// Copies the messages of a Post to its own rank, and removes them from sends_ and receives_.
void GpuCommunicator::CopyToSelf(Lane& lane) {
  const auto is_other = [this](const auto& buffer) { return buffer.peer != rank(); };
  const auto own_sends = std::stable_partition(sends_.begin(), sends_.end(), is_other);
  const auto own_receives = std::stable_partition(receives_.begin(), receives_.end(), is_other);
  for (auto send = own_sends, end = sends_.end(); send != end; ++send) {
    const ReceiveBuffer& receive = own_receives[send - own_sends];
    BURST_CUDA_CHECK(cudaMemcpyAsync(receive.data, send->data, send->bytes,
                                     cudaMemcpyDeviceToDevice, lane.stream));
  }
  sends_.erase(own_sends, sends_.end());
  receives_.erase(own_receives, receives_.end());
}

absl::Status GpuCommunicator::DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                                     absl::Span<const ReceiveBuffer> receives) {
  Lane& lane = this->lane(channel);
  SplitByDevice(sends, host_sends_, sends_);
  SplitByDevice(receives, host_receives_, receives_);
  BURST_RETURN_IF_ERROR(CheckOwn(rank(), sends_, receives_));
  if (!host_sends_.empty() || !host_receives_.empty()) {
    lane.posted_on_host = true;
    BURST_RETURN_IF_ERROR(host_->Post(channel, host_sends_, host_receives_));
  }
  if (sends_.empty() && receives_.empty()) return absl::OkStatus();
  const auto is_own = [this](const SendBuffer& send) { return send.peer == rank(); };
  if (std::any_of(sends_.begin(), sends_.end(), is_own)) {
    BURST_RETURN_IF_ERROR(Begin(lane));
    CopyToSelf(lane);
    if (sends_.empty() && receives_.empty()) return absl::OkStatus();
  }
  if (copies_ != nullptr) {
    lane.posted_copies = true;
    return copies_->Post(channel, sends_, receives_);
  }
  if (mail_ != nullptr) BURST_RETURN_IF_ERROR(PostMail(channel));
  return sends_.empty() && receives_.empty() ? absl::OkStatus() : PostNccl(channel);
}

// Posts the messages that the mail takes, and removes them from sends_ and receives_.
absl::Status GpuCommunicator::PostMail(Channel channel) {
  Take(sends_, mail_sends_, [&](const SendBuffer& send) {
    return mail_->Takes(channel, rank(), send.peer, send.bytes);
  });
  Take(receives_, mail_receives_, [&](const ReceiveBuffer& receive) {
    return mail_->Takes(channel, receive.peer, rank(), receive.bytes);
  });
  if (mail_sends_.empty() && mail_receives_.empty()) return absl::OkStatus();
  return mail_->Post(channel, mail_sends_, mail_receives_);
}

absl::Status GpuCommunicator::PostNccl(Channel channel) {
  Lane& lane = this->lane(channel);
  BURST_RETURN_IF_ERROR(Begin(lane));
  int64_t bytes = 0;
  for (const SendBuffer& send : sends_) bytes += send.bytes;
  for (const ReceiveBuffer& receive : receives_) bytes += receive.bytes;
  const int peer = WorldRank(receives_.empty() ? sends_[0].peer : receives_[0].peer);
  return Group(lane, "ncclSend and ncclRecv", peer, bytes, [&](ncclComm_t comm) {
    ncclResult_t result = ncclSuccess;
    for (size_t i = 0; i < receives_.size() && result == ncclSuccess; ++i) {
      const ReceiveBuffer& receive = receives_[i];
      result = ncclRecv(receive.data, receive.bytes, ncclInt8, receive.peer, comm, lane.stream);
    }
    for (size_t i = 0; i < sends_.size() && result == ncclSuccess; ++i) {
      const SendBuffer& send = sends_[i];
      result = ncclSend(send.data, send.bytes, ncclInt8, send.peer, comm, lane.stream);
    }
    return result;
  });
}

absl::Status GpuCommunicator::Wait(Channel channel) {
  Lane& lane = this->lane(channel);
  const bool mailed = mail_ != nullptr && mail_->has_posted(channel);
  const bool waits = std::exchange(lane.posted_copies, false) || lane.posted || mailed;
  if (waits) ScopedStreamWaits::Begin();
  if (lane.posted) Join(lane);
  if (mailed) mail_->Join(channel);
  if (copies_ != nullptr) BURST_RETURN_IF_ERROR(copies_->Wait(channel));
  if (waits) ScopedStreamWaits::End();
  if (std::exchange(lane.posted_on_host, false)) BURST_RETURN_IF_ERROR(host_->Wait(channel));
  return world_->failure.failed() ? world_->failure.failure() : absl::OkStatus();
}

absl::Status GpuCommunicator::AllReduceSum(const Tensor& tensor) {
  BURST_RETURN_IF_ERROR(PostAllReduceSum(tensor));
  Lane& lane = this->lane(Channel::kCollective);
  if (!lane.posted) return absl::OkStatus();
  ScopedStreamWaits::Begin();
  Join(lane);
  ScopedStreamWaits::End();
  return absl::OkStatus();
}

absl::Status GpuCommunicator::PostAllReduceSum(const Tensor& tensor) {
  BURST_CHECK(tensor.is_contiguous()) << ToString(tensor.shape());
  const ncclDataType_t type = NcclType(tensor.dtype());
  if (world_size() == 1 || tensor.numel() == 0) return absl::OkStatus();
  if (tensor.device() == DeviceType::kCpu) {
    BURST_RETURN_IF_ERROR(host_->AllReduceSum(tensor));
  } else {
    Lane& lane = this->lane(Channel::kCollective);
    BURST_RETURN_IF_ERROR(Begin(lane));
    BURST_RETURN_IF_ERROR(
        Group(lane, "ncclAllReduce", -1, tensor.size_bytes(), [&](ncclComm_t comm) {
          return ncclAllReduce(tensor.raw_data(), tensor.raw_data(), tensor.numel(), type, ncclSum,
                               comm, lane.stream);
        }));
  }
  CountAllReduce(tensor.numel(), SizeOf(tensor.dtype()));
  return absl::OkStatus();
}

// NCCL's all-gather and reduce-scatter need parts of equal size.
bool GpuCommunicator::IsOneNcclCall(absl::Span<const int64_t> counts, const Tensor& own) const {
  return world_size() > 1 && own.device() == DeviceType::kCuda && own.numel() > 0 &&
         std::all_of(counts.begin(), counts.end(),
                     [&](int64_t count) { return count == counts.front(); });
}

absl::Status GpuCommunicator::PostAllGatherParts(const Tensor& own,
                                                 absl::Span<const int64_t> counts,
                                                 const Tensor& all) {
  if (!IsOneNcclCall(counts, own)) return Communicator::PostAllGatherParts(own, counts, all);
  BURST_CHECK(own.is_contiguous() && all.is_contiguous() &&
              all.numel() == world_size() * own.numel() && own.numel() == counts[rank()]);
  Lane& lane = this->lane(Channel::kCollective);
  BURST_RETURN_IF_ERROR(Begin(lane));
  BURST_RETURN_IF_ERROR(Group(lane, "ncclAllGather", -1, all.size_bytes(), [&](ncclComm_t comm) {
    return ncclAllGather(own.raw_data(), all.raw_data(), own.size_bytes(), ncclInt8, comm,
                         lane.stream);
  }));
  CountSent(Channel::kCollective, (world_size() - 1) * own.size_bytes(), world_size() - 1);
  return absl::OkStatus();
}

absl::Status GpuCommunicator::PostReduceScatterSum(const Tensor& all,
                                                   absl::Span<const int64_t> counts,
                                                   const Tensor& own) {
  if (!IsOneNcclCall(counts, own)) return Communicator::PostReduceScatterSum(all, counts, own);
  BURST_CHECK(own.is_contiguous() && all.is_contiguous() && own.dtype() == all.dtype() &&
              all.numel() == world_size() * own.numel() && own.numel() == counts[rank()]);
  const ncclDataType_t type = NcclType(own.dtype());
  Lane& lane = this->lane(Channel::kCollective);
  BURST_RETURN_IF_ERROR(Begin(lane));
  BURST_RETURN_IF_ERROR(
      Group(lane, "ncclReduceScatter", -1, all.size_bytes(), [&](ncclComm_t comm) {
        return ncclReduceScatter(all.raw_data(), own.raw_data(), own.numel(), type, ncclSum, comm,
                                 lane.stream);
      }));
  CountSent(Channel::kCollective, (world_size() - 1) * own.size_bytes(), world_size() - 1);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Communicator>> GpuCommunicator::Split(int color, int key) {
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host, host_->Split(color, key));
  std::unique_ptr<Communicator> result;
  if (host == nullptr) return result;
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<GpuCommunicator> group, Create(host.get(), world_));
  group->owned_host_ = std::move(host);
  result = std::move(group);
  return result;
}

}  // namespace burst
