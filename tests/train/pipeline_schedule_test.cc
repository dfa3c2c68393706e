// Executes the schedules of a pipeline. Every stage takes its actions in order, as soon as their
// inputs have arrived.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "train/pipeline/schedule.h"

namespace burst {
namespace {

// Returns shapes of 1 to 6 stages, with one chunk and several.
std::vector<PipelineShape> Shapes() {
  std::vector<PipelineShape> shapes;
  for (int p = 1; p <= 6; ++p) {
    for (int v = 1; v <= 4; ++v) {
      for (int m = 1; m <= 24; ++m) {
        if (v == 1 || m == 1 || m % p == 0) shapes.push_back({p, v, m});
      }
    }
  }
  return shapes;
}

std::string NameOf(const PipelineShape& shape) {
  return absl::StrCat(shape.stages, " stages, ", shape.chunks, " chunks, ", shape.micro_batches,
                      " micro-batches");
}

using Key = std::tuple<bool, int, int>;  // forward, micro-batch, run of layers

// Executes a schedule with messages as a Pipeline sends them. A stage takes the message that an
// action needs and computes. It sends the result once the earlier message on this way was taken. A
// pass through a run takes a forward_time or a backward_time. Messages take no time.
struct Execution {
  bool completes = true;
  int64_t time = 0;       // from the first action to the last one's end
  int64_t most_live = 0;  // passes of stage 0 between forward and backward
};

// The messages of a stage in one direction, in the order they were sent.
struct Way {
  std::vector<Key> sent;
  std::vector<int64_t> sent_at, taken_at;
};

struct Stage {
  std::vector<PipelineAction> actions;
  size_t next = 0;
  bool computed = false;  // whether the next action's result waits to be sent
  int64_t free_at = 0;
  int64_t live = 0;
};

Execution Execute(const PipelineShape& shape, int forward_time, int backward_time) {
  const int p = shape.stages, runs = p * shape.chunks;
  std::vector<Stage> stages(p);
  for (int s = 0; s < p; ++s) stages[s].actions = PipelineActions(shape, s);
  std::map<std::pair<int, bool>, Way> ways;  // by sender and direction
  Execution result;
  // Does what a stage can do of its next action. Returns whether it can do anything.
  const auto advance = [&](int s) {
    Stage& stage = stages[s];
    if (stage.next == stage.actions.size()) return false;
    const PipelineAction& action = stage.actions[stage.next];
    const bool forward = action.forward;
    const int run = action.chunk * p + s, from = forward ? run - 1 : run + 1;
    const int to = forward ? run + 1 : run - 1;
    if (!stage.computed) {
      if (from >= 0 && from < runs) {
        Way& way = ways[{from % p, forward}];
        const size_t number = way.taken_at.size();
        if (number == way.sent.size()) return false;
        if (way.sent[number] != Key(forward, action.micro_batch, from)) {
          result.completes = false;  // the message is not what the action needs
          return false;
        }
        stage.free_at = std::max(stage.free_at, way.sent_at[number]);
        way.taken_at.push_back(stage.free_at);
      }
      stage.free_at += forward ? forward_time : backward_time;
      stage.computed = true;
      stage.live += forward ? 1 : -1;
      result.most_live = std::max(result.most_live, stages[0].live);
      result.time = std::max(result.time, stage.free_at);
    }
    if (to >= 0 && to < runs) {
      Way& way = ways[{s, forward}];
      if (way.taken_at.size() < way.sent.size()) return false;
      if (!way.sent.empty()) stage.free_at = std::max(stage.free_at, way.taken_at.back());
      way.sent.emplace_back(forward, action.micro_batch, run);
      way.sent_at.push_back(stage.free_at);
    }
    stage.computed = false;
    ++stage.next;
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int s = 0; s < p; ++s) {
      while (advance(s)) moved = true;
    }
  }
  for (const Stage& stage : stages) result.completes &= stage.next == stage.actions.size();
  return result;
}

TEST(PipelineSchedule, EveryStageMakesEveryPassOnceAndForwardFirst) {
  for (const PipelineShape& shape : Shapes()) {
    SCOPED_TRACE(NameOf(shape));
    for (int stage = 0; stage < shape.stages; ++stage) {
      std::set<std::pair<int, int>> forward, backward;
      for (const PipelineAction& action : PipelineActions(shape, stage)) {
        const std::pair<int, int> pass = {action.micro_batch, action.chunk};
        EXPECT_TRUE((action.forward ? forward : backward).insert(pass).second);
        EXPECT_TRUE(action.forward || forward.count(pass) == 1);
        EXPECT_TRUE(action.micro_batch < shape.micro_batches && action.chunk < shape.chunks);
      }
      EXPECT_EQ(static_cast<int>(forward.size()), shape.micro_batches * shape.chunks);
      EXPECT_EQ(backward, forward);
    }
  }
}

TEST(PipelineSchedule, CompletesWithOneMessageUnderWayInEachDirection) {
  for (const PipelineShape& shape : Shapes()) {
    EXPECT_TRUE(Execute(shape, 1, 2).completes) << NameOf(shape);
  }
}

// A stage keeps one activation of a chunk for each stage (PipeDream). With the interleaved
// schedule, it keeps those of the warm-up and one more.
TEST(PipelineSchedule, KeepsAsFewActivationsAs1F1BAllows) {
  for (const PipelineShape& shape : Shapes()) {
    const int p = shape.stages, v = shape.chunks, m = shape.micro_batches;
    const int64_t most = v == 1 ? std::min(p, m) : std::min(m * v, 2 * (p - 1) + (v - 1) * p + 1);
    EXPECT_LE(Execute(shape, 1, 2).most_live, most) << NameOf(shape);
  }
}

// A stage computes for v m (f + b) units, and is idle for the rest of the time.
TEST(PipelineSchedule, IsIdleForAsLongAsTheFormulaSays) {
  for (const PipelineShape& shape : Shapes()) {
    if (shape.chunks > 1 && shape.micro_batches % shape.stages != 0) continue;
    for (const auto& [f, b] : {std::pair(1, 1), std::pair(1, 2), std::pair(2, 3)}) {
      const double computes = shape.chunks * shape.micro_batches * (f + b);
      EXPECT_DOUBLE_EQ(static_cast<double>(Execute(shape, f, b).time),
                       computes * (1 + PipelineBubble(shape)))
          << NameOf(shape);
    }
  }
}

}  // namespace
}  // namespace burst
