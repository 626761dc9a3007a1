package egress

import (
	"bytes"
	gotls "crypto/tls"
	"encoding/binary"
	"errors"
	"net"
	"testing"
)

// clientHello is what this library's own client sends first.
func clientHello(t testing.TB, cfg *gotls.Config) []byte {
	t.Helper()
	ours, theirs := net.Pipe()
	defer ours.Close()
	cfg.InsecureSkipVerify = true
	go func() { _ = gotls.Client(theirs, cfg).Handshake() }()
	b := make([]byte, 16<<10)
	n, err := ours.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

// inRecords spreads a hello over records of n bytes.
func inRecords(b []byte, n int) []byte {
	var out []byte
	for message := b[5:]; len(message) > 0; {
		part := message[:min(n, len(message))]
		message = message[len(part):]
		out = binary.BigEndian.AppendUint16(append(out, 0x16, 3, 1), uint16(len(part)))
		out = append(out, part...)
	}
	return out
}

func TestHelloNamesItsServer(t *testing.T) {
	named := clientHello(t, &gotls.Config{ServerName: "OK.test"})
	for name, b := range map[string][]byte{
		"as sent": named, "with more behind": append(bytes.Clone(named), 0x14, 3, 3, 0, 1, 1),
		"a byte in each record": inRecords(named, 1), "seven bytes in each record": inRecords(named, 7),
	} {
		kind, h, err := classify(b)
		if kind != tls || h.serverName != "ok.test" || h.hidden || err != nil {
			t.Errorf("%s: got %v, %+v, %v", name, kind, h, err)
		}
	}
	for _, whole := range [][]byte{named, inRecords(named, 3)} {
		for n := range whole {
			if kind, _, err := classify(whole[:n]); kind != undecided || err != nil {
				t.Fatalf("after %d of %d bytes: got %v, %v", n, len(whole), kind, err)
			}
		}
	}
	kind, h, err := classify(clientHello(t, &gotls.Config{}))
	if kind != tls || h.serverName != "" || err != nil || h.meant("ok.test") == nil {
		t.Errorf("without a name: got %v, %+v, %v", kind, h, err)
	}
	kind, h, err = classify(clientHello(t, &gotls.Config{ServerName: "ok.test", MaxVersion: gotls.VersionTLS12}))
	if kind != tls || h.meant("ok.test") != nil || err != nil {
		t.Errorf("TLS 1.2: got %v, %+v, %v", kind, h, err)
	}
}

// extended is a hello with one more extension.
func extended(t *testing.T, kind uint16, body []byte) []byte {
	b := bytes.Clone(clientHello(t, &gotls.Config{ServerName: "ok.test", MaxVersion: gotls.VersionTLS12}))
	ext := binary.BigEndian.AppendUint16(nil, kind)
	ext = append(binary.BigEndian.AppendUint16(ext, uint16(len(body))), body...)
	at := 5 + 4 + 2 + 32
	at += 1 + int(b[at])
	at += 2 + int(binary.BigEndian.Uint16(b[at:]))
	at += 1 + int(b[at])
	grow := func(i int) { binary.BigEndian.PutUint16(b[i:], binary.BigEndian.Uint16(b[i:])+uint16(len(ext))) }
	grow(at)
	grow(3)
	grow(7)
	return append(b, ext...)
}

func TestOddHellosAreRefused(t *testing.T) {
	kind, h, err := classify(extended(t, extECH, []byte{0, 1}))
	if kind != tls || err != nil || !h.hidden || h.meant("ok.test") == nil {
		t.Errorf("ECH: got %v, %+v, %v", kind, h, err)
	}
	second := append([]byte{0, 12, 0, 0, 9}, "evil.test"...)
	named := clientHello(t, &gotls.Config{ServerName: "ok.test"})
	cut := bytes.Clone(named)
	cut[5+4+2+32] = 200 // a session id longer than the hello
	for name, c := range map[string]struct {
		b    []byte
		want error
	}{
		"two names":                 {extended(t, extServerName, second), errHello},
		"SSL 2.0":                   {[]byte{0x80, 0x2e, 1, 3, 1, 0, 0x15}, errOldTLS},
		"an alert first":            {append([]byte{0x15, 3, 1, 0, 2, 1, 0}, named...), errOpening},
		"a change of ciphers first": {append([]byte{0x14, 3, 3, 0, 1, 1}, named...), errOpening},
		"application data":          {[]byte{0x17, 3, 3, 0, 1, 1}, errOpening},
		"another handshake message": {[]byte{0x16, 3, 1, 0, 4, 2, 0, 0, 0}, errOpening},
		"an empty record":           {append([]byte{0x16, 3, 1, 0, 0}, named...), errHello},
		"a huge message":            {[]byte{0x16, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff}, errLarge},
		"lengths that lie":          {cut, errHello},
		"another record inside":     {append(inRecords(named, 50)[:55], 0x17, 3, 3, 0, 1, 1), errOpening},
	} {
		if kind, _, err := classify(c.b); kind != tls || !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, %v", name, kind, err)
		}
	}
	if _, _, err := classify(append([]byte{0x16, 3, 1, 0, 1}, make([]byte, maxHello)...)); err == nil {
		t.Error("a flood is read on")
	}
}

func TestClearTextIsLeftAlone(t *testing.T) {
	for _, text := range []string{"GET / HTTP/1.1\r\n", "\x05\x01\x00", "\x00\x00\x00\x08\x04\xd2\x16\x2f", "\x16\x02", "\xff\xfd\x03", "\x80\x00\x02", "\x10\x0c\x00\x04MQTT", "SSH-2.0-x"} {
		if kind, _, err := classify([]byte(text)); kind != clear || err != nil {
			t.Errorf("%q: got %v, %v", text, kind, err)
		}
	}
}

func FuzzClassify(f *testing.F) {
	f.Add(clientHello(f, &gotls.Config{ServerName: "ok.test"}))
	f.Add([]byte{0x80, 0x2e, 1, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		kind, h, err := classify(b)
		if err == nil && kind == tls && h.meant("ok.test") == nil && !bytes.Contains(bytes.ToLower(b), []byte("t")) {
			t.Error("a name out of nowhere")
		}
		again, g, _ := classify(append(bytes.Clone(b), 0))
		if kind == tls && err == nil && (again != tls || g != h) {
			t.Error("what follows a hello changes it")
		}
	})
}
