package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// loopback is the index of lo in every network namespace.
const loopback = 1

// setUp gives lo its addresses and makes every prefix local, so that what is
// sent there arrives at a listener in the same namespace. Without IPv6 in the
// kernel it does that for IPv4 alone and says so.
func (s *netlinkSocket) setUp(local []netip.Prefix) (ipv6 bool, err error) {
	if err := s.family(unix.AF_INET, host4, local); err != nil {
		return false, err
	}
	err = s.family(unix.AF_INET6, host6, local)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, syscall.EAFNOSUPPORT), errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.EACCES):
		return false, nil // not built in, or disabled for lo
	}
	return false, err
}

func (s *netlinkSocket) family(family byte, host netip.Prefix, local []netip.Prefix) error {
	s.address(family, host)
	first := s.seq
	if err := s.settle(first, host); err != nil {
		return err
	}
	for _, p := range local {
		if p.Addr().Is4() == (family == unix.AF_INET) {
			s.local(family, p)
		}
		if len(s.out) > 64<<10 {
			if err := s.settle(first, host); err != nil {
				return err
			}
		}
	}
	return s.settle(first, host)
}

// settle sends what is waiting and hears that all of it was done.
func (s *netlinkSocket) settle(first uint32, host netip.Prefix) error {
	if len(s.out) == 0 {
		return nil
	}
	s.wantAck()
	if err := s.flush(); err != nil {
		return fmt.Errorf("set up lo: %w", err)
	}
	err := s.acks(0, s.seq)
	if refusal, ok := errors.AsType[*ackError](err); ok && refusal.seq == first {
		return fmt.Errorf("give lo the address %s: %w", host, err)
	}
	if err != nil {
		return fmt.Errorf("make addresses local: %w", err)
	}
	return nil
}

func (s *netlinkSocket) address(family byte, p netip.Prefix) {
	s.message(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, func(a *attributes) {
		a.raw(family, byte(p.Bits()), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE, loopback, 0, 0, 0)
		a.bytes(unix.IFA_LOCAL, p.Addr().AsSlice()...)
		a.bytes(unix.IFA_ADDRESS, p.Addr().AsSlice()...)
	})
}

func (s *netlinkSocket) local(family byte, p netip.Prefix) {
	scope := byte(unix.RT_SCOPE_HOST)
	if family == unix.AF_INET6 {
		scope = unix.RT_SCOPE_UNIVERSE
	}
	s.message(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, func(a *attributes) {
		a.raw(family, byte(p.Bits()), 0, 0, unix.RT_TABLE_LOCAL, unix.RTPROT_STATIC, scope, unix.RTN_LOCAL, 0, 0, 0, 0)
		a.bytes(unix.RTA_DST, p.Addr().AsSlice()...)
		a.native(unix.RTA_OIF, loopback)
	})
}
