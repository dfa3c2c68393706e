// Ctrl-C and SIGTERM: asked once, the run stops after its step with a checkpoint; asked twice, it
// dies at once.
#pragma once

namespace burst {

void InstallInterruptHandler();

// The signal that asked the run to stop; 0 while none has.
int InterruptSignal();

}  // namespace burst
