package egress

import (
	"encoding/binary"
	"errors"
)

// What a client's first bytes look like.
type opening int

const (
	undecided opening = iota // more bytes are needed
	clear                    // not TLS: nothing more to look at
	tls                      // a whole ClientHello, which is read
)

// maxHello bounds a ClientHello: that of a post-quantum browser has about 2 KiB.
const maxHello = 32 << 10

// hello is what a ClientHello says about where it wants to go.
type hello struct {
	serverName string // lower case; empty: it does not say
	hidden     bool   // the true name is encrypted (ECH)
}

var (
	errHello   = errors.New("the TLS hello can't be read")
	errLarge   = errors.New("the TLS hello is too large")
	errOpening = errors.New("the connection opens with a TLS record that is no hello")
	errOldTLS  = errors.New("an SSL 2.0 hello names no server")
)

// classify looks at the first bytes of a client. Everything that a TLS server
// might take for the start of a connection is TLS, however odd its form.
func classify(b []byte) (opening, hello, error) {
	if len(b) == 0 {
		return undecided, hello{}, nil
	}
	if b[0]&0x80 != 0 { // an SSL 2.0 record whose message is a ClientHello of version 3
		if len(b) < 4 {
			if len(b) > 2 && b[2] != 1 {
				return clear, hello{}, nil
			}
			return undecided, hello{}, nil
		}
		if b[2] == 1 && b[3] == 3 {
			return tls, hello{}, errOldTLS
		}
		return clear, hello{}, nil
	}
	if b[0] < 0x14 || b[0] > 0x18 {
		return clear, hello{}, nil
	}
	if len(b) < 2 {
		return undecided, hello{}, nil
	}
	if b[1] != 3 {
		return clear, hello{}, nil
	}
	if b[0] != 0x16 {
		return tls, hello{}, errOpening
	}
	return records(b)
}

// records joins the handshake bytes of the records in b, over which a hello may
// be spread, and reads it once it is whole.
func records(b []byte) (opening, hello, error) {
	if len(b) > maxHello {
		return tls, hello{}, errLarge
	}
	var message []byte
	for len(b) >= 5 {
		if b[0] != 0x16 || b[1] != 3 {
			return tls, hello{}, errOpening
		}
		n := int(binary.BigEndian.Uint16(b[3:]))
		if n == 0 || n > 1<<14 {
			return tls, hello{}, errHello
		}
		part := b[5:min(5+n, len(b))]
		message = append(message, part...)
		if len(message) > 0 && message[0] != 1 {
			return tls, hello{}, errOpening
		}
		if len(message) >= 4 {
			size := int(message[1])<<16 | int(binary.BigEndian.Uint16(message[2:]))
			if size > maxHello {
				return tls, hello{}, errLarge
			}
			if len(message) >= 4+size {
				h, err := readHello(message[4 : 4+size])
				return tls, h, err
			}
		}
		b = b[5+len(part):]
		if len(part) < n {
			break
		}
	}
	return undecided, hello{}, nil
}

const (
	extServerName = 0
	extECH        = 0xfe0d
	extOldESNI    = 0xffce
)

// readHello reads the body of a ClientHello strictly: what two readers could
// take for different names is refused.
func readHello(b []byte) (hello, error) {
	r := cursor{b: b}
	r.take(2 + 32) // version, random
	r.take(r.uint8())
	r.take(r.uint16()) // cipher suites
	r.take(r.uint8())  // compression
	if r.bad {
		return hello{}, errHello
	}
	if len(r.b) == 0 { // no extensions
		return hello{}, nil
	}
	extensions := cursor{b: r.take(r.uint16())}
	if r.bad || len(r.b) > 0 {
		return hello{}, errHello
	}
	var h hello
	named := false
	for len(extensions.b) > 0 {
		kind := extensions.uint16()
		body := extensions.take(extensions.uint16())
		if extensions.bad {
			return hello{}, errHello
		}
		switch kind {
		case extServerName:
			name, err := readServerName(body)
			if err != nil || named {
				return hello{}, errHello
			}
			h.serverName, named = name, true
		case extECH, extOldESNI:
			h.hidden = true
		}
	}
	return h, nil
}

func readServerName(b []byte) (string, error) {
	r := cursor{b: b}
	names := cursor{b: r.take(r.uint16())}
	if r.bad || len(r.b) > 0 {
		return "", errHello
	}
	kind, name := names.uint8(), names.take(names.uint16())
	if names.bad || len(names.b) > 0 || kind != 0 || len(name) == 0 {
		return "", errHello
	}
	return normal(string(name)), nil
}

// cursor takes values off b; past its end it is bad.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) take(n int) []byte {
	if c.bad || n > len(c.b) {
		c.b, c.bad = nil, true
		return nil
	}
	head := c.b[:n]
	c.b = c.b[n:]
	return head
}

func (c *cursor) uint8() int {
	if b := c.take(1); b != nil {
		return int(b[0])
	}
	return 0
}

func (c *cursor) uint16() int {
	if b := c.take(2); b != nil {
		return int(binary.BigEndian.Uint16(b))
	}
	return 0
}
