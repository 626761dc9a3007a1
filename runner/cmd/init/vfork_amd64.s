#include "textflag.h"

// func vforkCall(args *cloneArgs, size uintptr) (pid uintptr)
//
// The child runs on this very stack, below this frame, while the parent is
// suspended; it must not come back up, so it calls from here what never returns.
TEXT ·vforkCall(SB),NOSPLIT,$8-24
	MOVQ	args+0(FP), DI
	MOVQ	size+8(FP), SI
	MOVQ	$435, AX // clone3
	SYSCALL
	TESTQ	AX, AX
	JNZ	parent
	CALL	·becomeCall(SB)
	INT	$3
parent:
	MOVQ	AX, pid+16(FP)
	RET
