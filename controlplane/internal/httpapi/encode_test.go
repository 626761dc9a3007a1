package httpapi

import (
	"testing"
	"time"
)

func TestNumbersAndTimesReadTheSameEverywhere(t *testing.T) {
	fresh := time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.FixedZone("", 3600))
	kept := time.UnixMicro(fresh.UnixMicro()) // as the database gives it back
	if got, want := *instant(fresh), *instant(kept); got != want {
		t.Errorf("got %v, then %v", got, want)
	}
	if instant(time.Time{}) != nil {
		t.Error("a time that has not come is told")
	}
	if got := micro(0.1 + 0.2); got != 0.3 {
		t.Errorf("got %v", got)
	}
}
