#include "burst/device/progress.h"

#ifdef BURST_WITH_CUDA
#include <array>
#include <atomic>
#include <cstring>
#include <list>
#include <mutex>
#include <vector>

#include "burst/device/cuda.h"
#include "burst/device/stream_words.h"
#endif

namespace burst {

#ifdef BURST_WITH_CUDA
namespace {

// The host's memory into which a context's GPU writes its numbers, one for each stream. Word 0 is
// for the context's own stream. The page is kept as long as the context.
class NumberPage {
 public:
  static constexpr int kWords = 1024;

  NumberPage() {
    if (!stream_words_.found()) return;
    void* memory = nullptr;
    BURST_CUDA_CHECK(cudaHostAlloc(&memory, kWords * sizeof(uint32_t), cudaHostAllocPortable));
    std::memset(memory, 0, kWords * sizeof(uint32_t));
    words_ = static_cast<volatile uint32_t*>(memory);
    // If a test number does not arrive, there are no marks, rather than marks that stand still.
    Write(cuda::CurrentStream(), 0, 1);
    BURST_CUDA_CHECK(cudaStreamSynchronize(cuda::CurrentStream()));
    if (words_[0] != 1) words_ = nullptr;
    for (int word = kWords - 1; word > 0; --word) free_.push_back(word);
  }

  bool works() const { return words_ != nullptr; }
  uint32_t Read(int word) const { return words_[word]; }
  // Writes a number after the work that is on the stream now. On failure it writes nothing, and
  // marks stand still.
  void Write(cudaStream_t stream, int word, uint32_t number) const {
    (void)stream_words_.Write(stream, &words_[word], number);
  }

  // Takes a word, or returns -1 if none is free. The stream that had a word before may still write
  // to it, so numbers continue from the word's value.
  int Take() {
    if (free_.empty()) return -1;
    const int word = free_.back();
    free_.pop_back();
    return word;
  }
  void GiveBack(int word) { free_.insert(free_.begin(), word); }

 private:
  const cuda::StreamWords stream_words_;
  volatile uint32_t* words_ = nullptr;
  std::vector<int> free_;
};

struct Message {
  const char* what = nullptr;
  int peer = -1;
  int64_t bytes = 0;
};

// The last kKept numbers that a stream was told to write, and what each stands for.
template <typename Thing, uint32_t kKept>
class Numbers {
 public:
  Numbers(const NumberPage* page, int word)
      : page_(page), word_(word), first_(page->Read(word)), last_(first_) {}

  int word() const { return word_; }
  uint32_t last() const { return last_; }
  uint32_t reached() const { return page_->Read(word_); }
  uint32_t Add(const Thing& thing) {
    things_[++last_ % kKept] = thing;
    return last_;
  }
  bool finished() const { return reached() == last_; }
  // Returns what a number stands for, or null if it is too long ago.
  const Thing* Get(uint32_t number) const {
    return number == first_ || last_ - number >= kKept ? nullptr : &things_[number % kKept];
  }

 private:
  const NumberPage* const page_;
  const int word_;
  const uint32_t first_;
  uint32_t last_;
  std::array<Thing, kKept> things_;
};

class CudaMarks : public DeviceMarks {
 public:
  struct Stream {
    const char* channel;
    Numbers<Message, 64> numbers;
  };

  explicit CudaMarks(NumberPage* page) : page_(page), marks_(page, 0) {
    current_progress->set_device(this);
  }
  ~CudaMarks() override {
    // The last mark says that all work is done. A later rank's numbers continue from it.
    if (current_progress != nullptr) current_progress->set_device(nullptr);
  }

  // Puts a mark on the rank's stream. It is reached when the work before it is done, and the device
  // is at the last reached mark.
  void Mark(const ProgressPlace& place) override {
    uint32_t number = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      number = marks_.Add(place);
    }
    page_->Write(cuda::CurrentStream(), marks_.word(), number);
  }

  uint64_t reached() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t sum = marks_.reached();
    for (const Stream& stream : streams_) sum += stream.numbers.reached();
    return sum;
  }

  std::string Describe() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    const uint32_t at = marks_.reached();
    if (const ProgressPlace* place = marks_.Get(at); place != nullptr) {
      text = "at " + burst::Describe(*place);
    } else {
      text = "not at its first mark";
    }
    text += ", " + std::to_string(marks_.last() - at) + " marks behind the host";
    for (const Stream& stream : streams_) {
      if (stream.numbers.finished()) continue;
      const uint32_t number = stream.numbers.reached() + 1;
      text += std::string("; channel ") + stream.channel + " has not finished ";
      const Message* const message = stream.numbers.Get(number);
      if (message == nullptr) {
        text += std::to_string(stream.numbers.last() - number + 1) + " messages";
        continue;
      }
      text += std::string(message->what) + " of " + std::to_string(message->bytes) + " bytes";
      if (message->peer >= 0) text += ", rank " + std::to_string(message->peer);
    }
    return text;
  }

  Stream* Add(const char* channel) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int word = page_->Take();
    if (word < 0) return nullptr;
    streams_.push_back({channel, Numbers<Message, 64>(page_, word)});
    return &streams_.back();
  }

  void Remove(Stream* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    page_->GiveBack(stream->numbers.word());
    streams_.remove_if([stream](const Stream& other) { return &other == stream; });
  }

  void Queued(Stream* stream, cudaStream_t on, const Message& message) {
    uint32_t number = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      number = stream->numbers.Add(message);
    }
    page_->Write(on, stream->numbers.word(), number);
  }

 private:
  NumberPage* const page_;
  mutable std::mutex mutex_;
  Numbers<ProgressPlace, 4096> marks_;
  std::list<Stream> streams_;
};

CudaMarks* Marks() {
  return current_progress == nullptr ? nullptr
                                     : static_cast<CudaMarks*>(current_progress->device());
}

}  // namespace

std::unique_ptr<DeviceMarks> MarkDeviceProgress(DeviceType device) {
  if (device != DeviceType::kCuda || current_progress == nullptr || !ProgressIsWatched()) {
    return nullptr;
  }
  auto& page = cuda::CurrentContext().Get<NumberPage>();
  if (!page.works()) return nullptr;
  return std::make_unique<CudaMarks>(&page);
}

MessageMarks::MessageMarks(const char* channel) {
  if (CudaMarks* marks = Marks(); marks != nullptr) stream_ = marks->Add(channel);
}

MessageMarks::~MessageMarks() {
  CudaMarks* const marks = Marks();
  if (stream_ != nullptr && marks != nullptr) {
    marks->Remove(static_cast<CudaMarks::Stream*>(stream_));
  }
}

void MessageMarks::Queued(void* stream, const char* what, int peer, int64_t bytes) {
  CudaMarks* const marks = Marks();
  if (stream_ == nullptr || marks == nullptr) return;
  marks->Queued(static_cast<CudaMarks::Stream*>(stream_), static_cast<cudaStream_t>(stream),
                {what, peer, bytes});
}
#else
std::unique_ptr<DeviceMarks> MarkDeviceProgress(DeviceType) { return nullptr; }
MessageMarks::MessageMarks(const char*) {}
MessageMarks::~MessageMarks() = default;
void MessageMarks::Queued(void*, const char*, int, int64_t) { (void)stream_; }
#endif

}  // namespace burst
