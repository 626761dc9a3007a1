package pytool

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
)

// Vault seals what valves hold with AES-256-GCM. What is sealed for one place
// opens in no other.
type Vault struct {
	aead cipher.AEAD
	mark [4]byte // tells keys apart
}

// place is where valves belong.
type place struct{ kind, workspace, tool, user string }

// A sealed text is its version, the mark of its key, a nonce and what GCM
// made.
const (
	sealedVersion = 1
	sealedHeader  = 1 + 4
)

// The reasons why a sealed text does not open.
var (
	errOtherKey = errors.New("it was sealed with another key")
	errBroken   = errors.New("it is damaged or belongs elsewhere")
)

// NewVault returns the vault of a secret, which may be any text that can't be
// guessed.
func NewVault(secret string) (*Vault, error) {
	material, err := hkdf.Key(sha256.New, []byte(secret), nil, "bigwave valves", 32+4)
	if err != nil {
		return nil, fmt.Errorf("derive the key of valves: %w", err)
	}
	block, err := aes.NewCipher(material[:32])
	if err != nil {
		return nil, fmt.Errorf("make the cipher of valves: %w", err)
	}
	aead, err := cipher.NewGCM(block)
	return &Vault{aead: aead, mark: [4]byte(material[32:])}, err
}

func (v *Vault) seal(plain []byte, at place) []byte {
	out := append([]byte{sealedVersion}, v.mark[:]...)
	nonce := make([]byte, v.aead.NonceSize())
	rand.Read(nonce)
	out = append(out, nonce...)
	return v.aead.Seal(out, nonce, plain, at.bytes(out[:sealedHeader]))
}

func (v *Vault) open(sealed []byte, at place) ([]byte, error) {
	if len(sealed) < sealedHeader+v.aead.NonceSize() || sealed[0] != sealedVersion {
		return nil, errBroken
	}
	header, rest := sealed[:sealedHeader], sealed[sealedHeader:]
	if !bytes.Equal(header[1:], v.mark[:]) {
		return nil, errOtherKey
	}
	nonce, text := rest[:v.aead.NonceSize()], rest[v.aead.NonceSize():]
	plain, err := v.aead.Open(nil, nonce, text, at.bytes(header))
	if err != nil {
		return nil, errBroken
	}
	return plain, nil
}

// bytes is the place as GCM binds it: each part with its length.
func (p place) bytes(header []byte) []byte {
	out := bytes.Clone(header)
	for _, part := range []string{p.kind, p.workspace, p.tool, p.user} {
		out = binary.BigEndian.AppendUint32(out, uint32(len(part)))
		out = append(out, part...)
	}
	return out
}
