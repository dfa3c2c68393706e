// The options that say what a run writes.
#include "train/config/option_group.h"

namespace burst {
namespace {

void AddRows(TrainConfig* c, OptionTable* t) {
  t->Group("output");
  t->Add("out", &c->out)
      .Basic()
      .NotSaved()
      .Of(Scope::kHost)
      .Help(
          "Write metrics.jsonl, config.json, checkpoints and loss.svg into this folder. Empty: "
          "runs/<model>-<number>.");
  t->AddSwitch("resume", &c->resume_mode, kResumes)
      .Basic()
      .NotSaved()
      .Help(
          "Continue the run in --out, with its configuration and what is given here. auto: start "
          "it if --out has no checkpoint.");
  t->Add("config", &c->config)
      .NotSaved()
      .Of(Scope::kHost)
      .Help("Read options from a JSON file; the command line wins.");
  t->Add("eval_every", &c->eval_every)
      .Min(0)
      .Unit("steps")
      .MayChange()
      .Help("Evaluate after every N steps. 0: never.");
  t->Add("eval_batches", &c->eval_batches)
      .Min(0)
      .MayChange()
      .Help("Evaluate N batches, spread evenly over the validation data. 0: all of it.");
  t->Add("checkpoint_every", &c->checkpoint_every)
      .Min(0)
      .Unit("steps")
      .MayChange()
      .Help("Save a checkpoint after every N steps. 0: at the end alone.");
  t->Add("checkpoint_files", &c->checkpoint_files, kCheckpointFiles)
      .MayChange()
      .Help(
          "Save in one file, in a file of each rank (ranks), or never (none). auto: ranks if they "
          "divide the state, else one.");
  t->Add("keep", &c->keep)
      .Min(1)
      .Unit("checkpoints")
      .MayChange()
      .Help("Keep the N newest checkpoints, and the best one by validation loss.");
  t->Add("log_every", &c->log_every)
      .Min(1)
      .Unit("steps")
      .MayChange()
      .Help("Print a line after every N steps if the output is not a terminal.");
  t->Add("tensorboard", &c->tensorboard)
      .MayChange()
      .Help("Write the metrics as an event file of TensorBoard, too.");
  t->Add("profile_steps", &c->profile_steps)
      .NotSaved()
      .Of(Scope::kProcess)
      .Help(
          "Profile steps FIRST-LAST, or one step, for `nsys profile "
          "--capture-range=cudaProfilerApi`. Empty: none.");
  t->Add("sample", &c->sample)
      .Min(-1)
      .Unit("tokens")
      .MayChange()
      .Help(
          "Generate N tokens at the end. -1: 256; none for shards without --tokenizer, with "
          "--zero=3 or --checkpoint_files=none.");
}

constexpr Side kProfile = {"profile_steps", "--profile_steps", "empty", "--profile_steps=3",
                           [](const Config& c) { return !c.given().profile_steps.empty(); }};
constexpr Side kOneFile = {
    "checkpoint_files", "--checkpoint_files=one", "auto or ranks", "--checkpoint_files=one",
    [](const Config& c) { return c.given().checkpoint_files == CheckpointFiles::kOne; }};
constexpr Side kFilePerRank = {"checkpoint_files", "--checkpoint_files=ranks", "auto or one",
                               "--checkpoint_files=ranks --ranks=2", [](const Config& c) {
                                 return c.given().checkpoint_files == CheckpointFiles::kRanks;
                               }};
constexpr Side kNoCheckpoints = {
    "checkpoint_files", "--checkpoint_files=none", "auto, one or ranks", "--checkpoint_files=none",
    [](const Config& c) { return c.given().checkpoint_files == CheckpointFiles::kNone; }};
constexpr Side kCheckpointEvery = {"checkpoint_every", "--checkpoint_every above 0", "0",
                                   "--checkpoint_every=5", [](const Config& c) {
                                     return c.checkpoint_every > 0 &&
                                            c.checkpoint_every != TrainConfig().checkpoint_every;
                                   }};
constexpr Side kKeep = {"keep", "--keep", "3", "--keep=5",
                        [](const Config& c) { return c.keep != TrainConfig().keep; }};
constexpr Side kSample = {"sample", "--sample above 0", "0", "--sample=9",
                          [](const Config& c) { return c.given().sample > 0; }};
constexpr Side kResume = {"resume", "--resume", "false", "--resume=auto", [](const Config& c) {
                            return c.resume || c.given().resume_mode != Resume::kNo;
                          }};
constexpr Side kNoOut = {"out", "without --out", "a folder", "",
                         [](const Config& c) { return c.out.empty(); }};

constexpr TrainConflict kConflicts[] = {
    {kOneFile, kPipeline, "every stage writes its own", "give auto"},
    {kFilePerRank, kOneRank, "one rank has nothing to share", "give auto"},
    {kCheckpointEvery, kNoCheckpoints, "nothing is saved", kLeaveOut},
    {kKeep, kNoCheckpoints, "nothing is saved", kLeaveOut},
    {kSample, kNoCheckpoints, "the last checkpoint writes the sample", kLeaveOut},
    {kProfile, kCpu, "a CPU is profiled by perf without help", "give --device=cuda"},
    {kResume, kNoOut, "that names the run to continue", "give --out"},
};

}  // namespace

const OptionGroup kOutputOptions = {AddRows, kConflicts};

}  // namespace burst
