package stream

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// How a chunk is moved.
const (
	chunkWait  = 5 * time.Second
	chunkTries = 4
)

// unavailable is the reason of a refusal that passes.
const unavailable = "unavailable"

// ErrBlob says that the other side answered and has no such blob, or that what
// came is not what was named. Trying again is of no use.
var ErrBlob = errors.New("blob refused")

// Blobs moves large things to and from the control plane in chunks. It may be
// used from several goroutines.
type Blobs struct {
	Conn   *nats.Conn
	Runner string
	NewID  func() string
}

// Get fetches b and checks its size and SHA-256.
func (b *Blobs) Get(ctx context.Context, want wire.Blob) ([]byte, error) {
	if want.Size < 0 || want.Size > wire.MaxBlob {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrBlob, want.Size, wire.MaxBlob)
	}
	data := make([]byte, 0, want.Size)
	for n := 0; int64(len(data)) < want.Size; n++ {
		reply, err := b.move(ctx, wire.BlobRequest{Op: wire.BlobGet, ID: want.ID, N: n})
		if err != nil {
			return nil, err
		}
		if len(reply.Data) == 0 || int64(len(data)+len(reply.Data)) > want.Size {
			return nil, fmt.Errorf("%w: chunk %d has the wrong size", ErrBlob, n)
		}
		data = append(data, reply.Data...)
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != want.SHA256 {
		return nil, fmt.Errorf("%w: its SHA-256 is not the one in the order", ErrBlob)
	}
	return data, nil
}

// Put uploads data under a new id and returns its name.
func (b *Blobs) Put(ctx context.Context, data []byte) (wire.Blob, error) {
	sum := sha256.Sum256(data)
	blob := wire.Blob{ID: b.NewID(), Size: int64(len(data)), SHA256: hex.EncodeToString(sum[:])}
	for n, at := 0, 0; at < len(data); n++ {
		chunk := data[at:min(at+wire.BlobChunk, len(data))]
		if _, err := b.move(ctx, wire.BlobRequest{Op: wire.BlobPut, ID: blob.ID, N: n, Data: chunk}); err != nil {
			return wire.Blob{}, err
		}
		at += len(chunk)
	}
	return blob, nil
}

// move carries one chunk; what got no answer is tried again.
func (b *Blobs) move(ctx context.Context, r wire.BlobRequest) (wire.BlobReply, error) {
	data, err := strictjson.Encode(r)
	if err != nil {
		return wire.BlobReply{}, err
	}
	for try := range chunkTries {
		var reply wire.BlobReply
		if reply, err = b.ask(ctx, data); err == nil || ctx.Err() != nil || errors.Is(err, ErrBlob) {
			return reply, err
		}
		select {
		case <-time.After(100 * time.Millisecond << try):
		case <-ctx.Done():
		}
	}
	return wire.BlobReply{}, fmt.Errorf("%s chunk %d of blob %s: %w", r.Op, r.N, r.ID, err)
}

func (b *Blobs) ask(ctx context.Context, data []byte) (wire.BlobReply, error) {
	ctx, cancel := context.WithTimeout(ctx, chunkWait)
	defer cancel()
	m, err := b.Conn.RequestWithContext(ctx, bus.Blob(b.Runner), data)
	if err != nil {
		return wire.BlobReply{}, err
	}
	var reply wire.BlobReply
	if err := strictjson.Decode(m.Data, &reply); err != nil {
		return wire.BlobReply{}, fmt.Errorf("read the answer: %w", err)
	}
	switch {
	case !reply.OK && reply.Reason == unavailable:
		return wire.BlobReply{}, errors.New("the control plane can't reach its blobs")
	case !reply.OK:
		return wire.BlobReply{}, fmt.Errorf("%w: %.100q", ErrBlob, reply.Reason)
	}
	return reply, nil
}
