package store_test

import (
	"testing"

	"github.com/bigwave/bigwave/controlplane/internal/store"
	"github.com/bigwave/bigwave/controlplane/internal/store/storetest"
)

func TestSchemaComesUpTwice(t *testing.T) {
	storetest.Each(t, func(t *testing.T, url string) {
		for range 2 {
			db, err := store.Open(t.Context(), store.Config{URL: url})
			if err != nil {
				t.Fatal(err)
			}
			if err := db.Ready(t.Context()); err != nil {
				t.Error(err)
			}
			if err := db.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}
