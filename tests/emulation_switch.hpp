// Fibers of an emulated GPU, x86-64.
#pragma once
// Saves the stack pointer of who calls, and goes on with another; swapcontext() would ask the operating system each time.
extern "C" void emulated_switch(void** save, void* load);
asm(R"(
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
