// bazel run //train: flags -> TrainConfig -> ranks -> Trainer.
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/comm/mpi_communicator.h"
#include "train/config.h"
#include "train/exit_code.h"
#include "train/interrupt.h"
#include "train/launch.h"
#include "train/train_flags.h"

namespace burst {
namespace {

// A launcher ends all processes when one fails. So those with nothing to say leave the one that
// speaks the time to do so, and are ended as soon as it has.
constexpr int kSecondsToSpeak = 10;

// Every process of a launcher finds the same mistake, and the first one says so. One that is alone
// with its mistake says it after a while.
int Refuse(const absl::Status& mistake) {
  if (ProcessRank() != 0) sleep(kSecondsToSpeak);
  return ExitCode(mistake, kExitBadUsage);
}

int Main(int argc, char** argv) {
  if (WantsHelp(argc, argv)) {
    std::fputs(TrainHelp().c_str(), stdout);
    return 0;
  }
  const absl::StatusOr<TrainConfig> options = TrainConfigFromArguments(argc, argv);
  if (!options.ok()) return Refuse(options.status());

  std::unique_ptr<Communicator> mpi;
  if (options->comm == CommKind::kMpi) {
    absl::StatusOr<std::unique_ptr<Communicator>> created = CreateMpiCommunicator();
    if (!created.ok()) return ExitCode(created.status(), kExitFailure);
    mpi = *std::move(created);
  }
  const absl::StatusOr<ResolvedConfig> config = ResolveConfig(*options, DetectLaunch(mpi.get()));
  if (!config.ok()) return Refuse(config.status());

  InstallInterruptHandler();
  const absl::Status status = RunTraining(*config, mpi.get());
  if (absl::IsCancelled(status)) sleep(kSecondsToSpeak);  // another rank has the error
  if (!status.ok()) return ExitCode(status, kExitFailure);
  return InterruptSignal() == 0 ? 0 : 128 + InterruptSignal();
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::Main(argc, argv); }
