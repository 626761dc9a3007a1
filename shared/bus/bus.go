// Package bus names the subjects, streams and headers of the message bus, and
// connects to it.
package bus

import (
	"regexp"
	"strings"
	"time"
)

// The streams.
const (
	Tickets = "BW_TICKETS" // work queue: one message wakes one runner
	Events  = "BW_EVENTS"  // frames, reports and notices, kept for EventAge
	Blobs   = "BW_BLOBS"   // chunks of blobs, only the control plane reads or writes it
)

// EventAge is how long the event stream and the blobs are kept.
const EventAge = 24 * time.Hour

// ControlPlane is the name under which the control plane itself publishes
// events; no runner may be called so.
const ControlPlane = "cp"

// Headers of messages on the event stream.
const (
	HeaderRun  = "Bw-Run"
	HeaderCall = "Bw-Call"
	HeaderKind = "Bw-Kind"
	HeaderFrom = "Bw-From" // notices: the replica that published it
)

// FinalsConsumer is the durable consumer of reports that all replicas share.
const FinalsConsumer = "finals"

var runnerName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// ValidRunner reports whether name may be a runner's or a pool's name.
func ValidRunner(name string) bool { return runnerName.MatchString(name) && name != ControlPlane }

// Start is where a pool's tickets wait.
func Start(pool string) string { return "bw.start." + pool }

// PoolConsumer is the shared pull consumer of a pool's tickets.
func PoolConsumer(pool string) string { return "pool-" + pool }

// Claim is where a runner claims sessions.
func Claim(runner string) string { return "bw.claim." + runner }

// Order is where a runner listens for orders.
func Order(runner string) string { return "bw.order." + runner }

// Blob is where a runner moves blobs.
func Blob(runner string) string { return "bw.blob." + runner }

// Beat is where a runner's beats go.
func Beat(runner string) string { return "bw.beat." + runner }

// Frame is where a runner's live frames of a session go.
func Frame(runner, session string) string { return "bw.event." + runner + "." + session + ".frame" }

// Final is where a runner's signed reports go.
func Final(runner, session string) string { return "bw.event." + runner + "." + session + ".final" }

// Notice is where the control plane's own notices about a session go.
func Notice(session string) string {
	return "bw.event." + ControlPlane + "." + session + ".notice"
}

// Subject patterns for subscriptions.
const (
	AllTickets = "bw.start.>"
	AllClaims  = "bw.claim.*"
	AllBlobs   = "bw.blob.*"
	AllBeats   = "bw.beat.*"
	BlobChunks = "bw.chunk.>" // the stream behind AllBlobs: bw.chunk.<runner>.<id>.<n>
	AllEvents  = "bw.event.>"
	AllFinals  = "bw.event.*.*.final"
	AllNotices = "bw.event." + ControlPlane + ".*.notice"
)

// RunnerOf returns the runner's name in a subject, or "".
func RunnerOf(subject string) string {
	parts := strings.Split(subject, ".")
	if len(parts) < 3 || parts[0] != "bw" {
		return ""
	}
	return parts[2]
}

// SessionOf returns the session in the subject of an event, or "".
func SessionOf(subject string) string {
	parts := strings.Split(subject, ".")
	if len(parts) < 5 || parts[0] != "bw" || parts[1] != "event" {
		return ""
	}
	return parts[3]
}
