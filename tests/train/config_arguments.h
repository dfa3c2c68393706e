// Makes a trainer's configuration from a command line, and files for one.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "train/config/config.h"

namespace burst {

inline absl::StatusOr<TrainConfig> Parse(const std::vector<std::string>& arguments) {
  std::vector<char*> argv = {const_cast<char*>("train")};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  return TrainConfigFromArguments(static_cast<int>(argv.size()), argv.data());
}

inline absl::StatusOr<ResolvedConfig> Resolve(const std::vector<std::string>& arguments,
                                              const Launch& launch = {1, 8}) {
  const absl::StatusOr<TrainConfig> config = Parse(arguments);
  if (!config.ok()) return config.status();
  return ResolveConfig(*config, launch);
}

inline std::string Write(const std::string& name, const std::string& content) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << content;
  return path;
}

}  // namespace burst
