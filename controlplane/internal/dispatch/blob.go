package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/shared/bus"
	"github.com/bigwave/bigwave/shared/strictjson"
	"github.com/bigwave/bigwave/shared/wire"
)

// maxBlobRequest is the largest request about a blob: a chunk in base64 and
// what is around it.
const maxBlobRequest = wire.BlobChunk*4/3 + 4096

// Why a blob can't be had.
var (
	errNotReady = errors.New("the bus is not ready")
	errNoBlob   = errors.New("blob is not there")
	errBlobHash = errors.New("blob is not what was signed")
)

var blobID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,100}$`)

// chunkSubject is where one chunk is kept. A runner's name is part of it: no
// runner reaches another's blobs.
func chunkSubject(runner, id string, n int) string {
	return "bw.chunk." + runner + "." + id + "." + strconv.Itoa(n)
}

// chunks is how many chunks size bytes are.
func chunks(size int64) int { return int((size + wire.BlobChunk - 1) / wire.BlobChunk) }

// putBlob keeps data for a runner under id and returns its description.
func (d *Dispatcher) putBlob(ctx context.Context, runner, id string, data []byte) (*wire.Blob, error) {
	if len(data) > wire.MaxBlob {
		return nil, fmt.Errorf("blob of %d bytes, at most %d", len(data), wire.MaxBlob)
	}
	for n := range chunks(int64(len(data))) {
		from := n * wire.BlobChunk
		chunk := data[from:min(from+wire.BlobChunk, len(data))]
		if _, err := d.JS.Publish(ctx, chunkSubject(runner, id, n), chunk); err != nil {
			return nil, fmt.Errorf("keep chunk %d of blob %s: %w", n, id, err)
		}
	}
	sum := sha256.Sum256(data)
	return &wire.Blob{ID: id, Size: int64(len(data)), SHA256: hex.EncodeToString(sum[:])}, nil
}

// blob returns the bytes of what a runner uploaded, checked against b.
func (d *Dispatcher) blob(ctx context.Context, runner string, b wire.Blob) ([]byte, error) {
	if !blobID.MatchString(b.ID) || b.Size < 0 || b.Size > wire.MaxBlob {
		return nil, fmt.Errorf("%w: bad description", errNoBlob)
	}
	var out bytes.Buffer
	out.Grow(int(b.Size))
	for n := range chunks(b.Size) {
		chunk, err := d.chunk(ctx, runner, b.ID, n)
		if err != nil {
			return nil, err
		}
		out.Write(chunk)
		if int64(out.Len()) > b.Size {
			return nil, fmt.Errorf("%w: longer than %d bytes", errBlobHash, b.Size)
		}
	}
	sum := sha256.Sum256(out.Bytes())
	if int64(out.Len()) != b.Size || hex.EncodeToString(sum[:]) != b.SHA256 {
		return nil, errBlobHash
	}
	return out.Bytes(), nil
}

func (d *Dispatcher) chunk(ctx context.Context, runner, id string, n int) ([]byte, error) {
	s := d.blobs.Load()
	if s == nil {
		return nil, errNotReady
	}
	m, err := (*s).GetLastMsgForSubject(ctx, chunkSubject(runner, id, n))
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return nil, fmt.Errorf("%w: chunk %d of %s", errNoBlob, n, id)
	case err != nil:
		return nil, fmt.Errorf("read chunk %d of blob %s: %w", n, id, err)
	}
	return m.Data, nil
}

// dropBlob forgets a blob; what it can't drop ages out.
func (d *Dispatcher) dropBlob(ctx context.Context, runner, id string) {
	err := errNotReady
	if s := d.blobs.Load(); s != nil {
		err = (*s).Purge(ctx, jetstream.WithPurgeSubject("bw.chunk."+runner+"."+id+".*"))
	}
	if err != nil {
		d.Log.WarnContext(ctx, "blob stays until it ages out", "blob", id, "error", err)
	}
}

// onBlob answers a runner that puts or gets a chunk.
func (d *Dispatcher) onBlob(ctx context.Context, m *nats.Msg) {
	d.reply(ctx, m, d.moveChunk(ctx, bus.RunnerOf(m.Subject), m.Data))
}

func (d *Dispatcher) moveChunk(ctx context.Context, runner string, data []byte) wire.BlobReply {
	var q wire.BlobRequest
	switch {
	case !bus.ValidRunner(runner):
		return wire.BlobReply{Reason: "runner"}
	case len(data) > maxBlobRequest:
		return wire.BlobReply{Reason: "size"}
	case strictjson.Decode(data, &q) != nil:
		return wire.BlobReply{Reason: "malformed"}
	case !blobID.MatchString(q.ID), q.N < 0, q.N >= chunks(wire.MaxBlob):
		return wire.BlobReply{Reason: "name"}
	case len(q.Data) > wire.BlobChunk:
		return wire.BlobReply{Reason: "size"}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	switch q.Op {
	case wire.BlobPut:
		if _, err := d.JS.Publish(ctx, chunkSubject(runner, q.ID, q.N), q.Data); err != nil {
			d.Log.WarnContext(ctx, "blob chunk not kept", "runner", runner, "error", err)
			return wire.BlobReply{Reason: "unavailable"}
		}
		return wire.BlobReply{OK: true}
	case wire.BlobGet:
		chunk, err := d.chunk(ctx, runner, q.ID, q.N)
		switch {
		case errors.Is(err, errNoBlob):
			return wire.BlobReply{Reason: "not_found"}
		case err != nil:
			d.Log.WarnContext(ctx, "blob chunk not read", "runner", runner, "error", err)
			return wire.BlobReply{Reason: "unavailable"}
		}
		return wire.BlobReply{OK: true, Data: chunk}
	}
	return wire.BlobReply{Reason: "op"}
}
