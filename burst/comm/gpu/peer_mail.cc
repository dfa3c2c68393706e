#include "burst/comm/gpu/peer_mail.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/device/code_loading.h"
#include "burst/device/cuda.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

constexpr char kVariable[] = "BURST_IPC";
constexpr int64_t kFlagBytes = 128;      // one flag a cache line
constexpr int64_t kFlagsBytes = 4096;    // all flags of a rank, before its mailboxes
constexpr uint32_t kFarAhead = 1 << 30;  // no stream has this number of pieces left to wait for
// The first messages take milliseconds. Streams end milliseconds after a failure, unless a GPU has
// failed, too.
constexpr std::chrono::seconds kTrialPatience{10}, kFreePatience{5};
constexpr std::chrono::milliseconds kPollInterval{2};

// What a rank tells the others.
struct Card {
  uint64_t host = 0;
  cudaIpcMemHandle_t memory = {};
  bool has_memory = false;
};

// Returns a number of this host, which no other one has.
uint64_t HostNumber() {
  std::string text;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), text);
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const unsigned char c : absl::StrCat(text, name)) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

absl::StatusOr<bool> IsWanted() {
  const char* const value = std::getenv(kVariable);
  const std::string text = value == nullptr ? "0" : value;
  if (text == "0" || text == "1") return text == "1";
  return absl::InvalidArgumentError(
      absl::StrCat(kVariable, ": must be 0 or 1; got ", text, "; leave it out for 0"));
}

absl::StatusOr<bool> AllCan(Communicator* host, bool can) {
  BURST_ASSIGN_OR_RETURN(const std::vector<double> all, host->AllGather(can));
  return std::count(all.begin(), all.end(), 1.0) == host->world_size();
}

// Whether a call worked. What a rank cannot do leaves no error behind.
bool Works(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess;
}

// Copies within a GPU, by a copy engine if the driver can be told so. A kernel would wait for
// attention, which may occupy all multiprocessors.
cudaError_t CopyWithin(void* to, const void* from, size_t bytes, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  return cudaMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first, 1, stream);
#else
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
#endif
}

}  // namespace

// Another rank's late write may take a flag back. So the flags are written until all is idle.
void PeerMails::Free() {
  for (bool idle = false; !std::exchange(idle, true); std::this_thread::sleep_for(kPollInterval)) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (PeerMail* mail : mails_) idle = mail->EndWaits() && idle;
  }
}

absl::StatusOr<std::unique_ptr<PeerMail>> PeerMail::Create(Communicator* host, PeerMails* mails) {
  std::unique_ptr<PeerMail> mail(new PeerMail(host, mails));
  const absl::StatusOr<bool> wanted = IsWanted();
  Card card;
  card.host = HostNumber();
  card.has_memory = wanted.ok() && *wanted && mail->Allocate(&card.memory);
  std::vector<Card> cards(host->world_size());
  BURST_RETURN_IF_ERROR(host->AllGather(&card, sizeof(card), cards.data()));
  BURST_RETURN_IF_ERROR(wanted.status());
  std::vector<cudaIpcMemHandle_t> handles;
  for (const Card& other : cards) {
    if (!other.has_memory || other.host != card.host) return std::unique_ptr<PeerMail>();
    handles.push_back(other.memory);
  }
  BURST_ASSIGN_OR_RETURN(const bool all_map, AllCan(host, mail->Map(handles)));
  if (!all_map) return std::unique_ptr<PeerMail>();
  mail->Register();
  BURST_ASSIGN_OR_RETURN(const bool all_pass, AllCan(host, mail->Try()));
  if (!all_pass) mail->Free();
  return all_pass ? std::move(mail) : nullptr;
}

PeerMail::PeerMail(Communicator* host, PeerMails* mails)
    : host_(host),
      mails_(mails),
      device_(cuda::CurrentContext().device),
      rank_(host->rank()),
      size_(host->world_size()),
      lines_(RingDistances(size_, Channel::kGradient).size()) {
  auto line = lines_.begin();
  for (const int distance : RingDistances(size_, Channel::kGradient)) (line++)->distance = distance;
  for (int c = 0; c < kChannels; ++c) pieces_.emplace_back(size_, piece_bytes());
}

int64_t PeerMail::piece_bytes() const {
  const int64_t slots = kChannels * static_cast<int64_t>(lines_.size()) * kMailSlots;
  return kMailBytes / slots / kFlagBytes * kFlagBytes;
}

bool PeerMail::Allocate(cudaIpcMemHandle_t* handle) {
  static_assert(kNumFlags * kChannels * kMostLines * kFlagBytes <= kFlagsBytes, "flags fit");
  void* memory = nullptr;
  if (!words_.found() || !Works(cudaMalloc(&memory, kFlagsBytes + kMailBytes))) return false;
  memory_ = static_cast<char*>(memory);
  int least = 0, greatest = 0;
  BURST_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // A stream of this priority shares no queue of the GPU with the streams that wait.
  const int between = (least + greatest) / 2;
  BURST_CUDA_CHECK(cudaStreamCreateWithPriority(&freeing_, cudaStreamNonBlocking, between));
  BURST_CUDA_CHECK(cudaMemsetAsync(memory_, 0, kFlagsBytes, freeing_));
  BURST_CUDA_CHECK(cudaStreamSynchronize(freeing_));
  return Works(cudaIpcGetMemHandle(handle, memory_));
}

bool PeerMail::Map(const std::vector<cudaIpcMemHandle_t>& handles) {
  const auto map = [&](int peer) {
    if (mapped_.count(peer) > 0) return true;
    void* memory = nullptr;
    if (!Works(cudaIpcOpenMemHandle(&memory, handles[peer], cudaIpcMemLazyEnablePeerAccess))) {
      return false;
    }
    mapped_[peer] = static_cast<char*>(memory);
    return true;
  };
  for (size_t l = 0; l < lines_.size(); ++l) {
    Line& line = lines_[l];
    const int to = (rank_ + line.distance) % size_;
    const int from = (rank_ + size_ - line.distance) % size_;
    if (!map(to) || !map(from)) return false;
    for (int c = 0; c < kChannels; ++c) {
      line.sends[c].slots = SlotsIn(mapped_[to], c, l);
      line.sends[c].waits = FlagIn(memory_, kFreed, c, l);
      line.sends[c].writes = FlagIn(mapped_[to], kArrived, c, l);
      line.receives[c].slots = SlotsIn(memory_, c, l);
      line.receives[c].waits = FlagIn(memory_, kArrived, c, l);
      line.receives[c].writes = FlagIn(mapped_[from], kFreed, c, l);
    }
  }
  return true;
}

volatile uint32_t* PeerMail::FlagIn(char* memory, Flag flag, int channel, size_t line) const {
  const size_t index = (flag * kChannels + channel) * kMostLines + line;
  return reinterpret_cast<volatile uint32_t*>(memory + index * kFlagBytes);
}

char* PeerMail::SlotsIn(char* memory, int channel, size_t line) const {
  const auto mailbox = static_cast<int64_t>(channel * lines_.size() + line);
  return memory + kFlagsBytes + mailbox * kMailSlots * piece_bytes();
}

void PeerMail::Register() {
  std::lock_guard<std::mutex> lock(mails_->mutex_);
  mails_->mails_.insert(this);
}

// Sends each rank a message on every line and channel, and looks at what arrives.
bool PeerMail::Try() {
  const auto count = static_cast<int64_t>(lines_.size());
  const Tensor out = Tensor::Empty({1}, DType::kFloat32, DeviceType::kCuda);
  const Tensor in = Tensor::Zeros({kChannels, count}, DType::kFloat32, DeviceType::kCuda);
  out.Fill(rank_ + 1);
  std::vector<float> expected;
  for (const Channel channel : {Channel::kRead, Channel::kGradient}) {
    std::vector<SendBuffer> sends;
    std::vector<ReceiveBuffer> receives;
    for (const Line& line : lines_) {
      const int from = (rank_ + size_ - line.distance) % size_;
      float* const place = static_cast<float*>(in.raw_data()) + expected.size();
      sends.push_back({out.raw_data(), 4, (rank_ + line.distance) % size_, DeviceType::kCuda});
      receives.push_back({place, 4, from, DeviceType::kCuda});
      expected.push_back(from + 1);
    }
    if (!Post(channel, sends, receives).ok()) return false;
    Join(channel);
  }
  const auto end = std::chrono::steady_clock::now() + kTrialPatience;
  while (cudaStreamQuery(cuda::CurrentStream()) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() > end) {
      Free();
      return false;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  (void)cudaGetLastError();
  return in.ToVector<float>() == expected;
}

PeerMail::~PeerMail() {
  if (mails_->failure_->failed()) Free();
  bool idle = true;
  ForEachFlow([&](Flow& flow, bool sends) {
    if (flow.stream == nullptr) return;
    if (!mails_->failure_->failed()) {
      if (flow.posted) JoinFlow(&flow);  // the memory of its messages may be freed next
      // The receivers' last writes to this rank's flags come before its memory is freed.
      if (sends) (void)words_.Wait(flow.stream, flow.waits, flow.last);
      cuda::CheckAtEnd("cudaStreamSynchronize", cudaStreamSynchronize(flow.stream));
    }
    idle = idle && cudaStreamQuery(flow.stream) == cudaSuccess;
  });
  {
    std::lock_guard<std::mutex> lock(mails_->mutex_);
    mails_->mails_.erase(this);
  }
  ForEachFlow([&](Flow& flow, bool) {
    if (flow.stream == nullptr) return;
    flow.marks = nullptr;
    cuda::RemoveMessageStream(flow.stream);
    cuda::CheckAtEnd("cudaEventDestroy", cudaEventDestroy(flow.done));
    cuda::CheckAtEnd("cudaStreamDestroy", cudaStreamDestroy(flow.stream));
  });
  if (freeing_ != nullptr) cuda::CheckAtEnd("cudaStreamDestroy", cudaStreamDestroy(freeing_));
  if (!idle) return;  // the GPU has failed: to free its memory could take for ever
  for (const auto& [peer, memory] : mapped_) {
    cuda::CheckAtEnd("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(memory));
  }
  if (memory_ != nullptr) cuda::CheckAtEnd("cudaFree", cudaFree(memory_));
}

template <typename Function>
void PeerMail::ForEachFlow(Function function) {
  for (Line& line : lines_) {
    for (Flow& flow : line.sends) function(flow, /*sends=*/true);
    for (Flow& flow : line.receives) function(flow, /*sends=*/false);
  }
}

int PeerMail::LineOf(int from, int to) const {
  const int distance = (to - from + size_) % size_;
  for (size_t l = 0; l < lines_.size(); ++l) {
    if (lines_[l].distance == distance) return static_cast<int>(l);
  }
  return -1;
}

bool PeerMail::Takes(Channel channel, int from, int to, int64_t bytes) const {
  return static_cast<int>(channel) < kChannels && bytes <= kMostBytes && LineOf(from, to) >= 0;
}

absl::Status PeerMail::Post(Channel channel, absl::Span<const SendBuffer> sends,
                            absl::Span<const ReceiveBuffer> receives) {
  if (mails_->failure_->failed()) return mails_->failure_->failure();
  const cuda::Context& context = cuda::CurrentContext();
  BURST_CUDA_CHECK(cudaEventRecord(context.event, context.stream));
  ++posts_;
  const int c = static_cast<int>(channel);
  posted_[c] = true;
  for (const MailPiece& piece : pieces_[c].Cut(sends, receives)) {
    const int peer = piece.sends ? sends[piece.message].peer : receives[piece.message].peer;
    Line& line = lines_[piece.sends ? LineOf(rank_, peer) : LineOf(peer, rank_)];
    Flow& flow = piece.sends ? line.sends[c] : line.receives[c];
    if (flow.post != posts_) Begin(channel, &flow);
    char* const slot = flow.slots + piece.slot() * piece_bytes();
    absl::Status queued;
    if (piece.sends) {
      const char* const data = static_cast<const char*>(sends[piece.message].data);
      queued = Queue(&flow, piece, piece.number - kMailSlots, slot, data + piece.offset);
    } else {
      char* const data = static_cast<char*>(receives[piece.message].data);
      queued = Queue(&flow, piece, piece.number, data + piece.offset, slot);
    }
    BURST_RETURN_IF_ERROR(queued);
    if (!piece.is_last) continue;
    flow.marks->Queued(flow.stream, piece.sends ? "a send" : "a receive", host_->WorldRank(peer),
                       piece.offset + piece.bytes);
  }
  if (!mails_->failure_->failed()) return absl::OkStatus();
  Free();  // the watchdog may have freed the streams before the last waits
  return mails_->failure_->failure();
}

// Orders a flow after the thread's stream, whose event the Post has recorded.
void PeerMail::Begin(Channel channel, Flow* flow) {
  const cuda::Context& context = cuda::CurrentContext();
  if (flow->stream == nullptr) {
    // The highest priority: where a copy within a GPU is a kernel, it starts before others do.
    int least = 0, greatest = 0;
    BURST_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t stream = nullptr;
    BURST_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    BURST_CUDA_CHECK(cudaEventCreateWithFlags(&flow->done, cudaEventDisableTiming));
    flow->stream = stream;
    flow->marks = std::make_unique<MessageMarks>(Name(channel));
    cuda::AddMessageStream(flow->stream);
  }
  BURST_CUDA_CHECK(cudaStreamWaitEvent(flow->stream, context.event, 0));
  flow->post = posts_;
  flow->posted = true;
}

// Queues a piece: waits until this rank's flag has reached `until`, copies, and tells the other
// rank.
absl::Status PeerMail::Queue(Flow* flow, const MailPiece& piece, uint32_t until, void* to,
                             const void* from) {
  flow->last = piece.number;
  if (!words_.Wait(flow->stream, flow->waits, until)) {
    return absl::UnavailableError("cuStreamWaitValue32: the GPU's stream must wait for a flag");
  }
  const cudaError_t copied =
      piece.sends ? cudaMemcpyAsync(to, from, piece.bytes, cudaMemcpyDefault, flow->stream)
                  : CopyWithin(to, from, piece.bytes, flow->stream);
  if (!Works(copied)) {
    return absl::UnavailableError(absl::StrCat("a copy of mail: ", cudaGetErrorString(copied)));
  }
  if (!words_.Write(flow->stream, flow->writes, piece.number)) {
    return absl::UnavailableError("cuStreamWriteValue32: the GPU's stream must write a flag");
  }
  return absl::OkStatus();
}

void PeerMail::Join(Channel channel) {
  if (!has_posted(channel)) return;
  const int c = static_cast<int>(channel);
  for (Line& line : lines_) {
    if (line.sends[c].posted) JoinFlow(&line.sends[c]);
    if (line.receives[c].posted) JoinFlow(&line.receives[c]);
  }
  posted_[c] = false;
}

void PeerMail::JoinFlow(Flow* flow) {
  BURST_CUDA_CHECK(cudaEventRecord(flow->done, flow->stream));
  BURST_CUDA_CHECK(cudaStreamWaitEvent(cuda::CurrentStream(), flow->done, 0));
  flow->posted = false;
}

void PeerMail::Free() {
  const auto end = std::chrono::steady_clock::now() + kFreePatience;
  while (!EndWaits() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kPollInterval);
  }
}

bool PeerMail::EndWaits() {
  if (!Works(cudaSetDevice(device_))) return true;  // the watchdog's thread has used no GPU
  bool idle = true;
  ForEachFlow([&](Flow& flow, bool) {
    if (flow.stream == nullptr || cudaStreamQuery(flow.stream) != cudaErrorNotReady) return;
    idle = false;
    (void)words_.Write(freeing_, flow.waits, flow.last + kFarAhead);
  });
  (void)cudaGetLastError();  // of the queries
  return idle;
}

}  // namespace burst
