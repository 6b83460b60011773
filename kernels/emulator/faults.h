// Faults in kernel code - an address that is not mapped, a division by zero, a stack overflow - end the launch and not
// the process.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <memory>

namespace emulator {

/// While one exists, a fault on a worker's OS thread is reported and the worker leaves its block. Every other thread's
/// faults go where they went before.
class FaultHandlers {
  public:
    FaultHandlers();
    FaultHandlers(const FaultHandlers&) = delete;
    ~FaultHandlers();
};

/// A stack for the handler: the fiber's own may be what has overflowed.
class HandlerStack {
  public:
    HandlerStack();
    HandlerStack(const HandlerStack&) = delete;
    ~HandlerStack();

  private:
    std::unique_ptr<char[]> memory_;
    stack_t previous_;
};

/// Makes the worker on `thread` leave its block if it is in kernel code just now: the way out of an endless loop when a
/// launch has been cancelled.
void interrupt(pthread_t thread);

}  // namespace emulator
