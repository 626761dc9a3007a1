module github.com/bigwave/bigwave/migrations

go 1.26.8
