package envelope

import (
	"crypto/ecdh"
	"crypto/rand"
	"errors"
	"testing"
)

func TestBoxes(t *testing.T) {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	other, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := SealBox(key.PublicKey(), "call_1", []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	plain, err := OpenBox(key, "call_1", sealed)
	if err != nil || string(plain) != "secret" {
		t.Fatalf("got %q, %v", plain, err)
	}
	changed := append([]byte(nil), sealed...)
	changed[len(changed)-1] ^= 1
	for name, open := range map[string]func() ([]byte, error){
		"another key":     func() ([]byte, error) { return OpenBox(other, "call_1", sealed) },
		"another purpose": func() ([]byte, error) { return OpenBox(key, "call_2", sealed) },
		"changed":         func() ([]byte, error) { return OpenBox(key, "call_1", changed) },
		"cut off":         func() ([]byte, error) { return OpenBox(key, "call_1", sealed[:20]) },
		"empty":           func() ([]byte, error) { return OpenBox(key, "call_1", nil) },
	} {
		if plain, err := open(); !errors.Is(err, ErrBox) {
			t.Errorf("%s: got %q, %v", name, plain, err)
		}
	}
	again, err := SealBox(key.PublicKey(), "call_1", []byte("secret"))
	if err != nil || string(again) == string(sealed) {
		t.Errorf("the same box twice, %v", err)
	}
}
