package envelope

import (
	"crypto/ecdh"
	"crypto/hpke"
	"errors"
	"fmt"
)

// ErrBox is what OpenBox answers: the box is for another key or another
// purpose, or it was changed.
var ErrBox = errors.New("box")

// suite is what boxes are made with.
func suite() (hpke.KDF, hpke.AEAD) { return hpke.HKDFSHA256(), hpke.ChaCha20Poly1305() }

// SealBox encrypts plain so that only the owner of the X25519 key to can read
// it, and only who names the same purpose: what it is for, such as a call's id.
func SealBox(to *ecdh.PublicKey, purpose string, plain []byte) ([]byte, error) {
	key, err := hpke.NewDHKEMPublicKey(to)
	if err != nil {
		return nil, fmt.Errorf("seal a box: %w", err)
	}
	kdf, aead := suite()
	sealed, err := hpke.Seal(key, kdf, aead, []byte(purpose), plain)
	if err != nil {
		return nil, fmt.Errorf("seal a box: %w", err)
	}
	return sealed, nil
}

// OpenBox is what SealBox has sealed for that purpose. The error wraps ErrBox.
func OpenBox(key *ecdh.PrivateKey, purpose string, sealed []byte) ([]byte, error) {
	private, err := hpke.NewDHKEMPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBox, err)
	}
	kdf, aead := suite()
	plain, err := hpke.Open(private, kdf, aead, []byte(purpose), sealed)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBox, err)
	}
	return plain, nil
}
