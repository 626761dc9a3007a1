#include "textflag.h"

// func vforkCall(args *cloneArgs, size uintptr) (pid uintptr)
//
// The child runs on this very stack, below this frame, while the parent is
// suspended; it must not come back up, so it calls from here what never returns.
TEXT ·vforkCall(SB),NOSPLIT,$16-24
	MOVD	args+0(FP), R0
	MOVD	size+8(FP), R1
	MOVD	$435, R8 // clone3
	SVC
	CBNZ	R0, parent
	CALL	·becomeCall(SB)
	BRK
parent:
	MOVD	R0, pid+16(FP)
	RET
