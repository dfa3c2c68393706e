// The places of a run at which something happens to one of its ranks: start, step, evaluation, save
// and exit. The run has 24 steps, evaluates after every 8th and saves after every 4th.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace burst {

// A place, and the checkpoints of a run that stands still there. Rank 0 writes a checkpoint while
// the next steps run, at most until the next save.
struct Place {
  const char* at;    // as in pausing_train.cc
  int64_t saved;     // the step whose checkpoint is there
  int64_t finished;  // the step whose checkpoint is there after the run was asked to stop; 0: none
  bool of_rank0 = false;
  // Whether every rank writes its part of a checkpoint. It is complete when all ranks have agreed
  // that their part is written, at the latest in the next save. Until then the previous one is the
  // newest.
  bool set = false;
};

constexpr Place kPlaces[] = {
    {"data 0 1", 0, 0},    {"start 0 4", 0, 0},
    {"forward 6 3", 4, 6}, {"backward 6 3", 4, 6},
    {"update 7 1", 4, 7},  {"evaluation 8 3", 4, 8},
    {"save 8 1", 4, 9},    {"write 12 3", 8, 17, /*of_rank0=*/true},
    {"exit 24 1", 24, 24},
};

inline bool IsIn(const Place& place, const char* phase) {
  return absl::StartsWith(place.at, phase);
}

inline bool IsBeforeTheSteps(const Place& place) { return place.saved + place.finished == 0; }

// Returns the name of a case's run.
inline std::string NameOf(const Place& place, int victim) {
  return absl::StrCat(absl::StrReplaceAll(place.at, {{" ", "_"}}), ".", victim);
}

}  // namespace burst
