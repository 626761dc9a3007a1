// Package seccomp makes the system call filters of a sandbox: what is not
// allowed is refused, with an errno that libraries know how to fall back from.
// User code has one; the init has a wider one, which user code is under as well.
//
// The result is classic BPF as the kernel takes it. It is a search tree over
// the call's number, since the kernel runs the filter once for every number
// when it is loaded, and that is part of what a call costs.
package seccomp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
)

// What a filter answers.
const (
	retAllow = 0x7fff0000
	retErrno = 0x00050000
	retKill  = 0x80000000 // the whole process
)

// Offsets of the data that a filter sees; both architectures are little-endian.
const (
	offNumber = 0
	offArch   = 4
	offArgs   = 16
)

// Program returns the filter of user code for an architecture as Go names it,
// as an array of the kernel's sock_filter. Calls by another architecture's
// numbers end the process; x32 numbers are unknown ones.
func Program(goarch string) ([]byte, error) { return program(goarch, ofUsers) }

// InitProgram returns the filter of the init and its supervisors. They have
// capabilities, on a cluster's runners the host's: it leaves them what making a
// sandbox and a call takes, and none of what reaches the kernel itself.
func InitProgram(goarch string) ([]byte, error) { return program(goarch, ofInit) }

func program(goarch string, r rules) ([]byte, error) {
	instructions, err := assemble(goarch, r)
	if err != nil {
		return nil, err
	}
	raw, err := bpf.Assemble(instructions)
	if err != nil {
		return nil, fmt.Errorf("assemble the system call filter: %w", err)
	}
	var b []byte
	for _, r := range raw {
		b = binary.LittleEndian.AppendUint16(b, r.Op)
		b = append(b, r.Jt, r.Jf)
		b = binary.LittleEndian.AppendUint32(b, r.K)
	}
	return b, nil
}

func assemble(goarch string, r rules) ([]bpf.Instruction, error) {
	var info *arch.Info
	switch goarch {
	case "amd64":
		info = arch.X86_64
	case "arm64":
		info = arch.AARCH64
	default:
		return nil, fmt.Errorf("no system call filter for %s", goarch)
	}
	var s search
	s.add(ranges(info.SyscallNames, r))
	body, err := s.instructions()
	if err != nil {
		return nil, err
	}
	return append([]bpf.Instruction{
		bpf.LoadAbsolute{Off: offArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(info.ID), SkipTrue: 1},
		bpf.RetConstant{Val: retKill},
		bpf.LoadAbsolute{Off: offNumber, Size: 4},
	}, body...), nil
}

// verdict is what happens to a number: one constant answer, or code that
// looks at the arguments.
type verdict struct {
	answer uint32
	code   []bpf.Instruction
}

func refuse(errno syscall.Errno) verdict { return verdict{answer: retErrno | uint32(errno)} }

// span is a range of numbers, up to the next one's first, with one verdict.
type span struct {
	first uint32
	verdict
}

// ranges gives every number there is a verdict.
func ranges(numbers map[string]int, r rules) []span {
	verdicts := map[int]verdict{}
	last := 0
	for _, number := range numbers { // the kernel has it and we do not allow it
		verdicts[number] = refuse(syscall.EPERM)
		last = max(last, number)
	}
	for _, name := range r.allowed {
		if number, ok := numbers[name]; ok {
			verdicts[number] = verdict{answer: retAllow}
		}
	}
	for _, name := range r.absent {
		if number, ok := numbers[name]; ok {
			verdicts[number] = refuse(syscall.ENOSYS)
		}
	}
	for _, name := range r.idle {
		if number, ok := numbers[name]; ok {
			verdicts[number] = refuse(0)
		}
	}
	for name, code := range r.examined {
		if number, ok := numbers[name]; ok {
			verdicts[number] = verdict{code: code}
		}
	}
	var spans []span
	for number := range last + 2 {
		v, ok := verdicts[number]
		if !ok {
			v = refuse(syscall.ENOSYS) // as from a kernel that does not know it
		}
		if n := len(spans); n > 0 && v.code == nil && spans[n-1].code == nil && spans[n-1].answer == v.answer {
			continue
		}
		spans = append(spans, span{uint32(number), v})
	}
	return spans
}

// search finds the span of the number in the accumulator and does what it
// says: jumps first, then the code of the examined, then each answer once. What
// every call pays for is the number of instructions.
type search struct {
	jumps   []jump
	code    []bpf.Instruction
	answers []uint32
}

// jump is one comparison and where it leads.
type jump struct {
	first     uint32 // of the higher half
	low, high place
}

// place is an index into one of the three parts.
type place struct{ part, index int }

const (
	inJumps = iota
	inCode
	inAnswers
)

// add puts spans into the search and returns where to begin with them.
func (s *search) add(spans []span) place {
	if len(spans) > 1 {
		at, middle := len(s.jumps), len(spans)/2
		s.jumps = append(s.jumps, jump{first: spans[middle].first})
		low, high := s.add(spans[:middle]), s.add(spans[middle:])
		s.jumps[at].low, s.jumps[at].high = low, high
		return place{inJumps, at}
	}
	if code := spans[0].code; code != nil {
		s.code = append(s.code, code...)
		return place{inCode, len(s.code) - len(code)}
	}
	i := slices.Index(s.answers, spans[0].answer)
	if i < 0 {
		i = len(s.answers)
		s.answers = append(s.answers, spans[0].answer)
	}
	return place{inAnswers, i}
}

func (s *search) instructions() ([]bpf.Instruction, error) {
	begin := [...]int{inJumps: 0, inCode: len(s.jumps), inAnswers: len(s.jumps) + len(s.code)}
	var out []bpf.Instruction
	for i, j := range s.jumps {
		low := begin[j.low.part] + j.low.index - i - 1
		high := begin[j.high.part] + j.high.index - i - 1
		if max(low, high) > 255 {
			return nil, errors.New("the system call filter is too long to jump across")
		}
		out = append(out, bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: j.first, SkipTrue: uint8(high), SkipFalse: uint8(low)})
	}
	out = append(out, s.code...)
	for _, a := range s.answers {
		out = append(out, answer(a))
	}
	return out, nil
}

// argument loads the low half of an argument: all that the kernel looks at
// where the parameter is an int.
func argument(n uint32) bpf.Instruction {
	return bpf.LoadAbsolute{Off: offArgs + 8*n, Size: 4}
}

func answer(a uint32) bpf.Instruction { return bpf.RetConstant{Val: a} }

func deny(errno syscall.Errno) bpf.Instruction { return answer(retErrno | uint32(errno)) }

func equal(value uint32, skipTrue, skipFalse uint8) bpf.Instruction {
	return bpf.JumpIf{Cond: bpf.JumpEqual, Val: value, SkipTrue: skipTrue, SkipFalse: skipFalse}
}
