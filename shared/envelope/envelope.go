// Package envelope seals payloads into DSSE envelopes and opens them again.
// The signed bytes are kept and decoded once, strictly; the payload's type is
// inside the signature.
package envelope

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"

	"github.com/bigwave/bigwave/shared/strictjson"
)

// What Open refuses, in the order of its checks. Each is a code that a reject
// record may carry.
var (
	ErrSize      = errors.New("size")
	ErrMalformed = errors.New("malformed")
	ErrType      = errors.New("type")
	ErrKey       = errors.New("unknown_key")
	ErrSignature = errors.New("signature")
	ErrPayload   = errors.New("payload")
)

type sealed struct {
	PayloadType string      `json:"payloadType"`
	Payload     string      `json:"payload"`
	Signatures  []signature `json:"signatures"`
}

type signature struct {
	KeyID string `json:"keyid"`
	Sig   string `json:"sig"`
}

// KeyID names a public key: the first 16 bytes of its SHA-256, in hex.
func KeyID(pub ed25519.PublicKey) string {
	sum := sha256.Sum256(pub)
	return hex.EncodeToString(sum[:16])
}

// Signer seals with one Ed25519 key. It may be used from several goroutines.
type Signer struct {
	key ed25519.PrivateKey
	id  string
}

// NewSigner returns a Signer for key.
func NewSigner(key ed25519.PrivateKey) *Signer {
	return &Signer{key: key, id: KeyID(key.Public().(ed25519.PublicKey))}
}

// Public is the public half of the signer's key.
func (s *Signer) Public() ed25519.PublicKey { return s.key.Public().(ed25519.PublicKey) }

// Seal encodes v as JSON and signs it under payloadType.
func (s *Signer) Seal(payloadType string, v any) ([]byte, error) {
	payload, err := strictjson.Encode(v)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", payloadType, err)
	}
	sig := ed25519.Sign(s.key, dsse.PAE(payloadType, payload))
	return strictjson.Encode(sealed{
		PayloadType: payloadType,
		Payload:     base64.StdEncoding.EncodeToString(payload),
		Signatures:  []signature{{KeyID: s.id, Sig: base64.StdEncoding.EncodeToString(sig)}},
	})
}

// Keys are the public keys that may sign, by KeyID.
type Keys map[string]ed25519.PublicKey

// NewKeys returns the set of the given keys.
func NewKeys(pubs ...ed25519.PublicKey) Keys {
	k := Keys{}
	for _, p := range pubs {
		k[KeyID(p)] = p
	}
	return k
}

// Open checks the envelope's size (at most limit bytes), form, type and
// signature, in that order, and decodes the signed payload strictly into v.
// The error wraps one of the Err values above.
func (k Keys) Open(payloadType string, limit int, data []byte, v any) error {
	if len(data) > limit {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrSize, len(data), limit)
	}
	var env sealed
	if err := strictjson.Decode(data, &env); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if len(env.Signatures) != 1 {
		return fmt.Errorf("%w: %d signatures, not one", ErrMalformed, len(env.Signatures))
	}
	if env.PayloadType != payloadType {
		return fmt.Errorf("%w: %.80q, not %q", ErrType, env.PayloadType, payloadType)
	}
	payload, err := base64.StdEncoding.Strict().DecodeString(env.Payload)
	if err != nil {
		return fmt.Errorf("%w: payload is not base64", ErrMalformed)
	}
	sig, err := base64.StdEncoding.Strict().DecodeString(env.Signatures[0].Sig)
	if err != nil {
		return fmt.Errorf("%w: signature is not base64", ErrMalformed)
	}
	pub, ok := k[env.Signatures[0].KeyID]
	if !ok {
		return fmt.Errorf("%w: %.80q", ErrKey, env.Signatures[0].KeyID)
	}
	if !ed25519.Verify(pub, dsse.PAE(payloadType, payload), sig) {
		return ErrSignature
	}
	if err := strictjson.Decode(payload, v); err != nil {
		return fmt.Errorf("%w: %w", ErrPayload, err)
	}
	return nil
}

// Reason is the short code of an error that Open returned.
func Reason(err error) string {
	for _, e := range []error{ErrSize, ErrMalformed, ErrType, ErrKey, ErrSignature, ErrPayload} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	return "error"
}
