// The options that say how a step changes the weights, and how many there are.
#include "train/config/option_group.h"

namespace burst {
namespace {

void AddSchedule(TrainConfig* c, OptionTable* t) {
  t->Add("batch", &c->batch)
      .Basic()
      .Min(1)
      .Unit("sequences")
      .Help("Put N sequences into a micro-batch, over all ranks.");
  // A larger number is a typing error.
  t->Add("accumulate", &c->accumulate)
      .Basic()
      .Min(1)
      .Max(1 << 20)
      .Unit("micro-batches")
      .Help("Accumulate the gradients of N micro-batches in a step.");
  t->Add("steps", &c->steps)
      .Basic()
      .Min(1)
      .Or(-1)
      .MayChange()
      .Help("Take N steps of the optimizer. -1: as --tokens or --epochs say, else 1,000.");
  t->Add("tokens", &c->tokens)
      .Min(0)
      .Unit("tokens")
      .MayChange()
      .Help("Train on N tokens, rounded up to a step. 0: as --steps says.");
  t->Add("epochs", &c->epochs)
      .Min(0)
      .Max(1e6)
      .MayChange()
      .Help("Visit the training data N times, rounded up to a step. 0: as --steps says.");
  t->Alternatives({"steps", "tokens", "epochs"});
  t->Add("lr", &c->lr)
      .Basic()
      .Above(0)
      .Max(1e30)
      .MayChange()
      .Help("Set the highest learning rate.");
  t->Add("min_lr", &c->min_lr)
      .Min(0)
      .Or(-1)
      .MayChange()
      .Help("Set the learning rate at the end. -1: lr / 10.");
  t->Add("warmup", &c->warmup)
      .Min(-1)
      .Unit("steps")
      .MayChange()
      .Help("Raise the learning rate over N steps. -1: steps / 20, at most 100.");
  t->Add("schedule", &c->schedule, ParseLrShape)
      .MayChange()
      .Help(
          "Lower the learning rate as cosine, linear, constant, or wsd (stable, then linear over "
          "the last fifth).");
}

void AddRows(TrainConfig* c, OptionTable* t) {
  t->Group("optimization");
  AddSchedule(c, t);
  t->Add("optimizer", &c->optimizer, kOptimizers)
      .Help(
          "Update by adamw, or the layers' matrices by muon, with AdamW's learning rate, and the "
          "rest by AdamW.");
  t->Add("muon_momentum", &c->muon_momentum)
      .Min(0)
      .Below(1)
      .Help("Set Muon's decay of the mean gradient.");
  t->Add("weight_decay", &c->weight_decay)
      .Min(0)
      .Help("Decay matrices and embeddings by AdamW's decoupled weight decay.");
  t->Add("beta1", &c->beta1).Min(0).Below(1).Help("Set AdamW's decay of the mean gradient.");
  t->Add("beta2", &c->beta2)
      .Min(0)
      .Below(1)
      .Help("Set AdamW's decay of the mean squared gradient.");
  t->Add("eps", &c->eps).Above(0).Help("Set AdamW's epsilon.");
  t->Add("clip", &c->clip).Min(0).MayChange().Help("Clip the norm of the gradient. 0: never.");
  t->Add("ema", &c->ema)
      .Min(0)
      .Below(1)
      .Help(
          "Keep an average of the weights that decays by D a step, for //train:export --ema and a "
          "validation loss of its own. 0: none.");
  t->Add("z_loss", &c->z_loss)
      .Min(0)
      .Help("Add Z times the squared logsumexp of the logits to the loss of training.");
  t->Add("seed", &c->seed)
      .Min(0)
      .Help("Seed the initial weights, the order of the data, dropout and the sample.");
}

constexpr Side kNotMuon = {"optimizer", "without --optimizer=muon", "muon", "",
                           [](const Config& c) { return c.optimizer != OptimizerKind::kMuon; }};
constexpr Side kMuonMomentum = {
    "muon_momentum", "--muon_momentum", "0.95", "--muon_momentum=0.9",
    [](const Config& c) { return c.muon_momentum != TrainConfig().muon_momentum; }};
constexpr Side kSteps = {"steps", "--steps", "-1", "--steps=10",
                         [](const Config& c) { return c.given().steps != -1; }};
constexpr Side kTokens = {"tokens", "--tokens", "0", "--tokens=100000",
                          [](const Config& c) { return c.tokens > 0; }};
constexpr Side kEpochs = {"epochs", "--epochs", "0", "--epochs=2",
                          [](const Config& c) { return c.epochs > 0; }};
constexpr Side kMinLr = {"min_lr", "--min_lr", "-1", "--min_lr=1e-5", [](const Config& c) {
                           return c.given().min_lr != -1 && c.given().min_lr != c.given().lr;
                         }};
constexpr Side kConstantLr = {"schedule", "--schedule=constant", "another one",
                              "--schedule=constant",
                              [](const Config& c) { return c.lr.shape == LrShape::kConstant; }};

constexpr TrainConflict kConflicts[] = {
    {kTokens, kSteps, "both say how long the run is", kLeaveOut},
    {kEpochs, kSteps, "both say how long the run is", kLeaveOut},
    {kEpochs, kTokens, "both say how long the run is", kLeaveOut},
    {kMinLr, kConstantLr, "the rate stays what it is", kLeaveOut},
    {kMuonMomentum, kNotMuon, "AdamW has --beta1", kLeaveOut},
};

}  // namespace

const OptionGroup kOptimizationOptions = {AddRows, kConflicts};

}  // namespace burst
