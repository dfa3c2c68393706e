// Feeds a fuzz target without a fuzzer: NAME_replay_test FOLDER MUTATIONS. First come the files of
// the corpus, which holds each input that once failed. Then come random mutations of them, equal in
// every run. If the program dies, it names the input on stderr.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/fuzz_target.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

std::string g_folder;
int g_mutations = 0;

// The name of the current input, which a signal handler reads.
char g_current[512];

void NameTheInput(int number) {
  const char text[] = "\nthe target died of: ";
  const bool told = write(STDERR_FILENO, text, sizeof(text) - 1) > 0 &&
                    write(STDERR_FILENO, g_current, std::strlen(g_current)) > 0 &&
                    write(STDERR_FILENO, "\n", 1) > 0;
  signal(number, SIG_DFL);
  raise(told ? number : SIGABRT);
}

using Bytes = std::vector<uint8_t>;

std::vector<std::pair<std::string, Bytes>> Corpus() {
  std::vector<std::pair<std::string, Bytes>> corpus;
  for (const auto& entry : fs::directory_iterator(g_folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.push_back(
        {entry.path().filename().string(), Bytes(std::istreambuf_iterator<char>(file), {})});
  }
  std::sort(corpus.begin(), corpus.end());
  return corpus;
}

void Feed(const Bytes& input, const std::string& name) {
  std::snprintf(g_current, sizeof(g_current), "%s", name.c_str());
  FuzzOne(input.data(), input.size());
}

// Makes a few changes as fuzzers do, of bits, bytes and numbers. It also removes and repeats
// pieces, or takes them from another input.
class Mutator {
 public:
  explicit Mutator(int seed) : random_(seed) {}

  int Below(size_t n) { return static_cast<int>(random_() % std::max<size_t>(1, n)); }

  void Mutate(Bytes* input, const Bytes& other) {
    for (int changes = 1 + Below(4); changes > 0; --changes) Change(input, other);
  }

 private:
  void Change(Bytes* input, const Bytes& other) {
    const size_t at = Below(input->size() + 1), left = input->size() - at;
    const auto place = input->begin() + static_cast<int64_t>(at);
    switch (Below(7)) {
      case 0:
        if (left > 0) *place ^= 1 << Below(8);
        break;
      case 1:
        if (left > 0) *place = static_cast<uint8_t>(Below(256));
        break;
      case 2: {
        constexpr uint8_t kBytes[] = {0, 1, 0x7F, 0x80, 0xFF, '"', '{', '[', '-', '9', 'e', '='};
        input->insert(place, kBytes[Below(sizeof(kBytes))]);
        break;
      }
      case 3:
        input->erase(place, place + Below(std::min<size_t>(left, 16) + 1));
        break;
      case 4: {
        const Bytes piece(place, place + Below(std::min<size_t>(left, 64) + 1));
        input->insert(input->begin() + Below(input->size() + 1), piece.begin(), piece.end());
        break;
      }
      case 5: {
        const auto from = other.begin() + Below(other.size() + 1);
        const int count = Below(std::min<size_t>(other.end() - from, 64) + 1);
        input->insert(place, from, from + count);
        break;
      }
      case 6: {
        const uint64_t numbers[] = {0, 1, UINT32_MAX, INT32_MAX, INT64_MAX, UINT64_MAX, 1 << 16};
        const uint64_t number = numbers[Below(7)];
        std::memcpy(input->data() + at, &number, std::min<size_t>(left, Below(2) == 0 ? 4 : 8));
        break;
      }
    }
  }

  std::mt19937_64 random_;
};

TEST(Replay, Corpus) {
  const auto corpus = Corpus();
  ASSERT_FALSE(corpus.empty()) << g_folder;
  for (const auto& [name, input] : corpus) Feed(input, name);
  Feed({}, "no bytes");
}

TEST(Replay, Mutations) {
  const auto corpus = Corpus();
  ASSERT_FALSE(corpus.empty()) << g_folder;
  for (int i = 0; i < g_mutations; ++i) {
    Mutator mutator(i);
    const auto& [name, input] = corpus[mutator.Below(corpus.size())];
    Bytes mutated = input;
    mutator.Mutate(&mutated, corpus[mutator.Below(corpus.size())].second);
    Feed(mutated, name + ", mutation " + std::to_string(i));
  }
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s FOLDER MUTATIONS\n", argv[0]);
    return 2;
  }
  burst::g_folder = argv[1];
  burst::g_mutations = std::atoi(argv[2]);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // A small input must not ask for gigabytes. Sanitizers reserve terabytes of addresses.
  const rlimit most = {rlim_t{4} << 30, rlim_t{4} << 30};
  setrlimit(RLIMIT_AS, &most);
  for (int number : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS, SIGILL}) {
    signal(number, burst::NameTheInput);
  }
#else
  signal(SIGABRT, burst::NameTheInput);
#endif
  return RUN_ALL_TESTS();
}
