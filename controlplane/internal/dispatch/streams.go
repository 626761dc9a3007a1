package dispatch

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bigwave/bigwave/shared/bus"
)

// Limits bound what the bus keeps, in bytes.
type Limits struct {
	Events int64 // 0 means 1 GiB
	Blobs  int64 // 0 means 1 GiB
}

// ticketAge is how long a ticket that nobody pulls is kept. Its session has
// a deadline that is shorter and then gets a new one.
const ticketAge = 5 * time.Minute

// finalsAckWait is after how long an unacknowledged report comes again: those
// that a replica had in hand when it died. One that comes twice does no harm.
const finalsAckWait = 5 * time.Second

// ensure makes the streams and consumers that are missing, and brings those
// that are there up to date.
func (d *Dispatcher) ensure(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, c := range d.streams() {
		s, err := d.JS.CreateOrUpdateStream(ctx, c)
		if err != nil {
			return fmt.Errorf("make stream %s: %w", c.Name, err)
		}
		if c.Name == bus.Blobs {
			d.blobs.Store(&s)
		}
	}
	_, err := d.JS.CreateOrUpdateConsumer(ctx, bus.Events, jetstream.ConsumerConfig{
		Durable:       bus.FinalsConsumer,
		Description:   "signed reports of the runners, shared by all replicas",
		FilterSubject: bus.AllFinals,
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       finalsAckWait,
		MaxDeliver:    -1,
		MaxAckPending: 4096,
	})
	if err != nil {
		return fmt.Errorf("make consumer %s: %w", bus.FinalsConsumer, err)
	}
	d.pools.Clear()
	return d.ensurePool(ctx, d.Pool)
}

func (d *Dispatcher) streams() []jetstream.StreamConfig {
	return []jetstream.StreamConfig{
		{
			Name:        bus.Tickets,
			Description: "sessions that want a sandbox",
			Subjects:    []string{bus.AllTickets},
			Retention:   jetstream.WorkQueuePolicy,
			Storage:     jetstream.FileStorage,
			MaxAge:      ticketAge,
			MaxBytes:    64 << 20,
			Duplicates:  time.Minute,
		},
		{
			Name:        bus.Events,
			Description: "live frames, signed reports and notices",
			Subjects:    []string{bus.AllEvents},
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardOld,
			Storage:     jetstream.FileStorage,
			MaxAge:      bus.EventAge,
			MaxBytes:    cmp.Or(d.Limits.Events, 1<<30),
			Duplicates:  2 * time.Minute,
		},
		{
			Name:              bus.Blobs,
			Description:       "chunks of large scripts and outputs",
			Subjects:          []string{bus.BlobChunks},
			Retention:         jetstream.LimitsPolicy,
			Discard:           jetstream.DiscardOld,
			Storage:           jetstream.FileStorage,
			MaxAge:            bus.EventAge,
			MaxBytes:          cmp.Or(d.Limits.Blobs, 1<<30),
			MaxMsgsPerSubject: 1,
			AllowDirect:       true,
			Duplicates:        time.Minute,
		},
	}
}

// ensurePool makes the shared consumer from which a pool's runners pull.
func (d *Dispatcher) ensurePool(ctx context.Context, pool string) error {
	if _, ok := d.pools.Load(pool); ok || !bus.ValidRunner(pool) {
		return nil
	}
	_, err := d.JS.CreateOrUpdateConsumer(ctx, bus.Tickets, jetstream.ConsumerConfig{
		Durable:       bus.PoolConsumer(pool),
		Description:   "tickets of one pool, shared by its runners",
		FilterSubject: bus.Start(pool),
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       5 * time.Second,
		MaxDeliver:    -1,
		MaxAckPending: 4096,
		MaxWaiting:    4096,
	})
	if err != nil {
		return fmt.Errorf("make consumer %s: %w", bus.PoolConsumer(pool), err)
	}
	d.pools.Store(pool, true)
	return nil
}
