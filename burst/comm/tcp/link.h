// A connection of this process with another rank, after their greeting.
#pragma once

#include <optional>

#include "burst/comm/tcp/seal.h"
#include "burst/comm/tcp/socket.h"

namespace burst {

struct PeerLink {
  Socket socket;
  std::optional<Seal> seal;  // none: a Unix socket between processes of one user
};

}  // namespace burst
