package envelope_test

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bigwave/bigwave/shared/envelope"
)

type letter struct {
	To   string `json:"to"`
	Text string `json:"text"`
}

const kind = "application/vnd.test+json"

func signer(t *testing.T) *envelope.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return envelope.NewSigner(key)
}

func TestOpenReturnsWhatWasSealed(t *testing.T) {
	s := signer(t)
	data, err := s.Seal(kind, letter{"a", "b"})
	if err != nil {
		t.Fatal(err)
	}
	var got letter
	if err := envelope.NewKeys(s.Public()).Open(kind, 1<<20, data, &got); err != nil {
		t.Fatal(err)
	}
	if want := (letter{"a", "b"}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestOpenRefusesEveryFlippedBit(t *testing.T) {
	s := signer(t)
	data, err := s.Seal(kind, letter{"a", "b"})
	if err != nil {
		t.Fatal(err)
	}
	keys := envelope.NewKeys(s.Public())
	for i := range data {
		for bit := range 8 {
			bad := []byte(string(data))
			bad[i] ^= 1 << bit
			var got letter
			if err := keys.Open(kind, 1<<20, bad, &got); err == nil {
				t.Fatalf("byte %d bit %d: %s was accepted", i, bit, bad)
			}
		}
	}
}

func TestOpenSaysWhyItRefuses(t *testing.T) {
	s, other := signer(t), signer(t)
	good, _ := s.Seal(kind, letter{"a", "b"})
	foreign, _ := other.Seal(kind, letter{"a", "b"})
	extra, _ := s.Seal(kind, map[string]string{"to": "a", "cc": "b"})
	unframed := ed25519Raw(t, s)
	for name, tc := range map[string]struct {
		data  string
		typ   string
		limit int
		want  error
	}{
		"too large":           {string(good), kind, 10, envelope.ErrSize},
		"not an envelope":     {`{"to":"a"}`, kind, 1 << 20, envelope.ErrMalformed},
		"plain json":          {`{}`, kind, 1 << 20, envelope.ErrMalformed},
		"two signatures":      {strings.Replace(string(good), `"signatures":[`, `"signatures":[{"keyid":"x","sig":""},`, 1), kind, 1 << 20, envelope.ErrMalformed},
		"no signature":        {`{"payload":"e30=","payloadType":"` + kind + `","signatures":[]}`, kind, 1 << 20, envelope.ErrMalformed},
		"another type":        {string(good), "application/other", 1 << 20, envelope.ErrType},
		"type swapped":        {strings.Replace(string(good), kind, "application/other", 1), "application/other", 1 << 20, envelope.ErrSignature},
		"unknown key":         {string(foreign), kind, 1 << 20, envelope.ErrKey},
		"key id of another":   {strings.Replace(string(foreign), envelope.KeyID(other.Public()), envelope.KeyID(s.Public()), 1), kind, 1 << 20, envelope.ErrSignature},
		"unknown field":       {string(extra), kind, 1 << 20, envelope.ErrPayload},
		"signed without type": {unframed, kind, 1 << 20, envelope.ErrSignature},
		"trailing bytes":      {string(good) + "{}", kind, 1 << 20, envelope.ErrMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			var got letter
			err := envelope.NewKeys(s.Public()).Open(tc.typ, tc.limit, []byte(tc.data), &got)
			if !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

// ed25519Raw is an envelope whose signature covers the payload alone.
func ed25519Raw(t *testing.T, s *envelope.Signer) string {
	t.Helper()
	_, key, _ := ed25519.GenerateKey(nil)
	payload := []byte(`{"to":"a","text":"b"}`)
	sig := ed25519.Sign(key, payload)
	return fmt.Sprintf(`{"payloadType":%q,"payload":%q,"signatures":[{"keyid":%q,"sig":%q}]}`, kind,
		base64.StdEncoding.EncodeToString(payload), envelope.KeyID(s.Public()), base64.StdEncoding.EncodeToString(sig))
}

func TestKeyFilesRoundTripAndAreClosed(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "key")
	made, err := envelope.LoadOrMake(path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := envelope.LoadOrMake(path)
	if err != nil {
		t.Fatal(err)
	}
	if !made.Sign.Equal(again.Sign) || !made.Box.Equal(again.Box) {
		t.Error("the second start made other keys")
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o600 {
		t.Errorf("got mode %o, want 600", st.Mode().Perm())
	}
	pub := filepath.Join(dir, "pub")
	if err := envelope.WritePublic(pub, made.Public()); err != nil {
		t.Fatal(err)
	}
	if got, err := envelope.LoadPublic(pub); err != nil || !got.Sign.Equal(made.Public().Sign) {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := envelope.LoadPublic(path); err == nil {
		t.Error("a private file was read as a public one")
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := envelope.LoadPrivate(path); err == nil {
		t.Error("a private file that others may read was accepted")
	}
}
