// Tests the files that are made once from the data. One process makes them, after any failure of
// others, and damaged files are never used.
#include "train/data/data_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/data/corpus.h"
#include "train/data/sources.h"

// Counts the destructors of thread_local objects that threads register. Without memory for one, the
// C library ends the process.
extern "C" {
int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library);
std::atomic<int> registered{0};
int __cxa_thread_atexit(void (*destroy)(void*), void* object, void* library) {
  ++registered;
  return __cxa_thread_atexit_impl(destroy, object, library);
}
}

namespace burst {
namespace {

namespace fs = std::filesystem;

class DataCacheTest : public testing::Test {
 protected:
  void SetUp() override { folder_ = FreshTestFolder(); }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string CacheFolder() const { return Path("cache"); }

  std::string Write(const std::string& name, const std::string& content) const {
    std::ofstream(Path(name), std::ios::binary) << content;
    return Path(name);
  }

  // Writes numbers and blank lines. Some MB take a few milliseconds.
  std::string WriteText(const std::string& name, int64_t bytes) const {
    std::string text;
    for (int64_t i = 0; static_cast<int64_t>(text.size()) < bytes; ++i) {
      absl::StrAppend(&text, i * 7919 % 100003, i % 5 == 0 ? "\n\n" : " \xC3\xA9 ");
    }
    return Write(name, text);
  }

  // Returns the cache's files with this suffix, the latest first.
  std::vector<std::string> Files(const std::string& suffix) const {
    std::vector<std::string> files;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(CacheFolder(), error)) {
      if (absl::StrContains(entry.path().filename().string(), suffix)) {
        files.push_back(entry.path().string());
      }
    }
    return files;
  }

  absl::StatusOr<TrainingData> Load(const std::string& data) const {
    return LoadTrainingData(data, "", std::nullopt, CacheFolder());
  }

  // Returns the text again from all tokens, as a proof without a hash.
  static std::string TextOf(const TrainingData& data) {
    std::vector<int32_t> tokens(data.train.corpus->size());
    EXPECT_EQ(data.train.corpus->Read(0, data.train.corpus->size(), tokens.data()),
              absl::OkStatus());
    return data.tokenizer->Decode(tokens);
  }

  // Runs `body` in a process of its own and returns its wait status.
  static pid_t Fork(const std::function<int()>& body) {
    const pid_t pid = fork();
    if (pid == 0) _exit(body());
    return pid;
  }
  static int WaitFor(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return status;
  }

  std::string folder_;
};

TEST_F(DataCacheTest, ASecondStartReadsNothingOfTheText) {
  const std::string path = WriteText("text.txt", 3 << 20);
  const auto first = Load(path);
  ASSERT_EQ(first.status(), absl::OkStatus());
  EXPECT_EQ(TextOf(*first), ReadAll(path));
  ASSERT_EQ(Files(".cache").size(), 1u);
  const auto bytes_read = [] {
    std::string io = ReadAll("/proc/self/io");
    return std::atoll(io.c_str() + io.find("rchar: ") + 7);
  };
  const auto before = bytes_read();
  const auto second = Load(path);
  ASSERT_EQ(second.status(), absl::OkStatus());
  EXPECT_LT(bytes_read() - before, 400 << 10) << "footer, table and blocks that were needed";
  EXPECT_EQ(TextOf(*second), TextOf(*first));
  EXPECT_TRUE(second->has_documents);
}

TEST_F(DataCacheTest, OtherContentOtherTokenizerOtherFile) {
  const std::string path = Write("a.txt", "abcabc");
  ASSERT_EQ(Load(path).status(), absl::OkStatus());
  ASSERT_EQ(LoadTrainingData(path, "", Tokenizer::Kind::kByte, CacheFolder()).status(),
            absl::OkStatus());
  EXPECT_EQ(Files(".cache").size(), 2u);
  // The new file has the same size and the same time of modification.
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  Write("a.txt", "xyzxyz");
  const timespec times[] = {info.st_atim, info.st_mtim};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  const auto changed = Load(path);
  ASSERT_EQ(changed.status(), absl::OkStatus());
  EXPECT_EQ(TextOf(*changed), "xyzxyz");
}

// A file of an earlier version, whose tokenizers found other tokens, is not read.
TEST_F(DataCacheTest, AnEarlierVersionsTokensAreMadeAgain) {
  const auto tokenizer = Tokenizer::Load(TokenizerFixture("tiny"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto load = [&](const std::string& path) {
    return LoadTrainingData(path, "", std::nullopt, CacheFolder(), &*tokenizer);
  };
  const std::string path = Write("a.txt", "the ring");
  ASSERT_EQ(load(Write("other.txt", "gnir eht")).status(), absl::OkStatus());
  ASSERT_EQ(Files(".cache").size(), 1u);
  const auto sources = FindSources("data", path);
  ASSERT_TRUE(sources.ok()) << sources.status();
  const std::string key =
      absl::StrCat("texts 5 ", tokenizer->ToJson(), "\n\n", Fingerprint({&*sources}));
  const XXH128_hash_t hash = XXH3_128bits(key.data(), key.size());
  fs::rename(Files(".cache")[0],
             absl::StrFormat("%s/%016x%016x.cache", CacheFolder(), hash.high64, hash.low64));
  const auto data = load(path);
  ASSERT_EQ(data.status(), absl::OkStatus());
  EXPECT_EQ(TextOf(*data), "the ring");
}

// For every changed byte and every length, the file is made again, or the damage is found in a
// read.
TEST_F(DataCacheTest, DamageIsNeverBelieved) {
  const std::string text = "one\n\ntwo\n\nthree";
  const std::string path = Write("a.txt", text);
  ASSERT_EQ(Load(path).status(), absl::OkStatus());
  ASSERT_EQ(Files(".cache").size(), 1u);
  const std::string cache = Files(".cache")[0], whole = ReadAll(cache);
  const auto check = [&](const std::string& damaged) {
    std::ofstream(cache, std::ios::binary | std::ios::trunc) << damaged;
    const auto data = Load(path);
    if (data.ok()) {
      std::vector<int32_t> tokens(text.size());
      std::vector<int64_t> starts;
      absl::Status status = data->train.corpus->Read(0, text.size(), tokens.data());
      status.Update(data->train.corpus->DocumentStarts(0, text.size(), &starts));
      if (status.ok()) {
        EXPECT_EQ(data->tokenizer->Decode(tokens), text);
        EXPECT_EQ(starts, (std::vector<int64_t>{0, 5, 10}));
        return;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_TRUE(absl::StrContains(status.message(), "--data_cache: " + cache)) << status;
    }
    // After the damage was found, the next start makes the file again.
    const auto again = Load(path);
    ASSERT_EQ(again.status(), absl::OkStatus());
    EXPECT_EQ(TextOf(*again), text);
  };
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] ^= 1 << (i % 8);
    check(damaged);
    if (i % 8 == 0) check(whole.substr(0, i));
  }
  check(whole + "x");
}

TEST_F(DataCacheTest, DamageDuringARunIsAnError) {
  const std::string path = WriteText("text.txt", 1 << 20);
  const auto data = Load(path);
  ASSERT_EQ(data.status(), absl::OkStatus());
  const std::string cache = Files(".cache")[0];
  {
    std::fstream file(cache, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(600000);
    file.put('\x7F');
  }
  std::vector<int32_t> tokens(16);
  EXPECT_EQ(data->train.corpus->Read(0, 16, tokens.data()), absl::OkStatus());
  absl::Status status = data->train.corpus->Read(300000, 16, tokens.data());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StrContains(status.message(), "the next start makes it anew")) << status;
  EXPECT_FALSE(fs::exists(cache));
  EXPECT_EQ(TextOf(*Load(path)), ReadAll(path));
  // A file that becomes shorter does not cause SIGBUS.
  const std::string shorter = Files(".cache")[0];
  const auto open = Load(path);
  fs::resize_file(shorter, 1000);
  status = open->train.corpus->Read(200000, 16, tokens.data());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
}

// Eight threads or processes start at once, and one makes the file.
TEST_F(DataCacheTest, OneMakesItTheOthersWait) {
  const DataCache cache(CacheFolder());
  std::atomic<int> made{0};
  const auto get = [&]() -> absl::Status {
    const auto make = [&](CheckedFileWriter* payload) -> absl::StatusOr<DataCache::Content> {
      ++made;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      const absl::Status status = payload->Write(0, "payload", 7);
      if (!status.ok()) return status;
      return DataCache::Content{7, "description"};
    };
    const auto file = cache.Get(
        "key", [](const CheckedFile&) { return absl::OkStatus(); }, make);
    if (!file.ok()) return file.status();
    return (*file)->description() == "description" ? absl::OkStatus() : absl::InternalError("?");
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { EXPECT_EQ(get(), absl::OkStatus()); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 1);

  const std::string path = WriteText("text.txt", 8 << 20);
  std::vector<pid_t> processes;
  for (int i = 0; i < 8; ++i) {
    processes.push_back(Fork([&] {
      const auto data = Load(path);
      return data.ok() && data->train.corpus->size() > 1 << 20 ? 0 : 1;
    }));
  }
  for (const pid_t process : processes) EXPECT_EQ(WaitFor(process), 0);
  EXPECT_EQ(Files(".cache").size(), 2u);
  EXPECT_TRUE(Files(".tmp").empty());
  EXPECT_EQ(TextOf(*Load(path)), ReadAll(path));
}

TEST_F(DataCacheTest, ReadingRegistersNoDestructor) {
  const auto data = Load(WriteText("text.txt", 1 << 20));
  ASSERT_EQ(data.status(), absl::OkStatus());
  const int before = registered;
  std::thread([&] {
    std::vector<int32_t> tokens(16);
    EXPECT_EQ(data->train.corpus->Read(500000, 16, tokens.data()), absl::OkStatus());
  }).join();
  EXPECT_EQ(registered, before);
}

// Also if several try at once, each gets its own error.
TEST_F(DataCacheTest, NothingStaysOfAFileThatCannotBeMade) {
  const DataCache cache(Path("runs/cache"));
  const auto fails = [&] {
    const auto file = cache.Get(
        "key", [](const CheckedFile&) { return absl::OkStatus(); },
        [](CheckedFileWriter*) { return absl::InvalidArgumentError("no text"); });
    EXPECT_EQ(file.status(), absl::InvalidArgumentError("no text"));
  };
  fails();
  EXPECT_FALSE(fs::exists(Path("runs")));
  // If several fail at once, one may leave the folders of another one, but no file.
  for (int times = 0; times < 50; ++times) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back(fails);
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE(!fs::exists(Path("runs/cache")) || fs::is_empty(Path("runs/cache")));
  }
  fs::remove_all(Path("runs"));
  // Folders and files that were there before stay.
  fs::create_directories(Path("runs/cache"));
  fails();
  EXPECT_TRUE(fs::is_empty(Path("runs/cache")));
  fs::remove(Path("runs/cache"));
  Write("runs/notes", "theirs");
  fails();
  EXPECT_TRUE(fs::exists(Path("runs/notes")));
  EXPECT_FALSE(fs::exists(Path("runs/cache")));
}

TEST_F(DataCacheTest, KilledWhileItMakesOne) {
  const std::string path = WriteText("text.txt", 1 << 20);
  const auto killed_while_making = [&](const std::string& key) {
    const int status = WaitFor(Fork([&] {
      const auto make = [](CheckedFileWriter* payload) -> absl::StatusOr<DataCache::Content> {
        (void)payload->Write(0, "half of it", 10);
        raise(SIGKILL);
        return absl::InternalError("not killed");
      };
      (void)DataCache(CacheFolder())
          .Get(
              key, [](auto&) { return absl::OkStatus(); }, make);
      return 0;
    }));
    EXPECT_TRUE(WIFSIGNALED(status));
  };
  killed_while_making("key");
  killed_while_making("another key");
  EXPECT_EQ(Files(".tmp").size(), 1u) << "the second one has swept the first one's";
  EXPECT_TRUE(Files(".cache").empty());
  EXPECT_EQ(TextOf(*Load(path)), ReadAll(path));
  EXPECT_TRUE(Files(".tmp").empty()) << "leftovers are swept";

  // The kill comes at any moment of a real encoding.
  for (int i = 0; i < 10; ++i) {
    fs::remove_all(CacheFolder());
    const pid_t process = Fork([&] { return Load(path).ok() ? 0 : 1; });
    std::this_thread::sleep_for(std::chrono::microseconds(3000 * i));
    kill(process, SIGKILL);
    WaitFor(process);
    const auto data = Load(path);
    ASSERT_EQ(data.status(), absl::OkStatus());
    ASSERT_EQ(TextOf(*data), ReadAll(path));
  }
}

TEST_F(DataCacheTest, KeepsWhatWasUsedLast) {
  const std::string used = Write("used.txt", "used");
  ASSERT_EQ(Load(used).status(), absl::OkStatus());
  const std::string file = Files(".cache")[0];
  for (int i = 0; i < DataCache::kKept + 3; ++i) {
    ASSERT_EQ(Load(used).status(), absl::OkStatus());
    ASSERT_EQ(Load(Write("other.txt", absl::StrCat("other ", i))).status(), absl::OkStatus());
  }
  EXPECT_EQ(Files(".cache").size(), static_cast<size_t>(DataCache::kKept));
  EXPECT_TRUE(fs::exists(file));
}

// --data_cache may be a folder with other uses.
TEST_F(DataCacheTest, FilesOfOthersStay) {
  const std::string digits(32, 'a');
  fs::create_directory(CacheFolder());
  std::vector<std::string> others = {"notes.tmp-draft", digits + "a.tmp-123456",
                                     "B" + digits.substr(1) + ".tmp-123456", digits + "0.cache"};
  for (int i = 0; i < 10; ++i) others.push_back(absl::StrCat("my", i, ".cache"));
  for (const std::string& name : others) Write("cache/" + name, "theirs");
  Write("cache/" + digits + ".tmp-123456", "of a killed process");
  for (int i = 0; i < DataCache::kKept + 3; ++i) {
    ASSERT_EQ(Load(Write("other.txt", absl::StrCat("other ", i))).status(), absl::OkStatus());
  }
  for (const std::string& name : others)
    EXPECT_TRUE(fs::exists(CacheFolder() + "/" + name)) << name;
  EXPECT_FALSE(fs::exists(CacheFolder() + "/" + digits + ".tmp-123456"));
  EXPECT_EQ(Files(".cache").size(), DataCache::kKept + size_t{11});
  EXPECT_EQ(Files("notes").size(), 1u) << "no lock was made for it";
}

// A process keeps a few hundred KiB for 16 MiB of text, which are 30 MiB of tokens.
TEST_F(DataCacheTest, ProcessesHoldNoCopy) {
  if (kAddressSanitizer) GTEST_SKIP() << "freed memory stays with the address sanitizer";
  const std::string path = WriteText("text.txt", 16 << 20);
  ASSERT_EQ(Load(path).status(), absl::OkStatus());
  std::vector<pid_t> processes;
  for (int i = 0; i < 4; ++i) {
    processes.push_back(Fork([&]() -> int {
      const auto anonymous_kib = [] {
        const std::string status = ReadAll("/proc/self/status");
        return std::atoll(status.c_str() + status.find("RssAnon:") + 8);
      };
      const auto before = anonymous_kib();
      const auto data = Load(path);
      if (!data.ok()) return 1;
      std::vector<int32_t> tokens(1 << 10);
      for (int64_t at = 0; at + 1024 < data->train.corpus->size(); at += 1024) {
        if (!data->train.corpus->Read(at, 1024, tokens.data()).ok()) return 2;
      }
      return anonymous_kib() - before < 4096 ? 0 : 3;
    }));
  }
  for (const pid_t process : processes) EXPECT_EQ(WaitFor(process), 0);
}

// Making the file takes a few MiB of memory a thread, not the text's size.
TEST_F(DataCacheTest, MakesItInLittleMemory) {
  if (kThreadSanitizer) GTEST_SKIP() << "it keeps several bytes for each one that is used";
  const std::string path = WriteText("text.txt", 48 << 20);
  const int status = WaitFor(Fork([&]() -> int {
    const auto peak_kib = [] {
      rusage usage;
      getrusage(RUSAGE_SELF, &usage);
      return usage.ru_maxrss;
    };
    const auto before = peak_kib();
    if (!Load(path).ok()) return 1;
    return peak_kib() - before < (32 << 10) ? 0 : 2;
  }));
  EXPECT_EQ(status, 0);
}

TEST_F(DataCacheTest, AFolderThatCannotBeMade) {
  const std::string path = Write("a.txt", "abc"), file = Write("file", "");
  const auto data = LoadTrainingData(path, "", std::nullopt, file + "/cache");
  EXPECT_TRUE(absl::StartsWith(data.status().message(), "--data_cache: cannot make the folder"))
      << data.status();
  // The size of files is limited, so that writing fails as on a full disk.
  const std::string text = WriteText("text.txt", 1 << 20);
  const int status = WaitFor(Fork([&]() -> int {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {100000, 100000};
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto full = Load(text);
    return absl::StartsWith(full.status().message(), "--data_cache: cannot write ") ? 0 : 1;
  }));
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(Files(".tmp").empty());
}

}  // namespace
}  // namespace burst
