package httpapi

import (
	"context"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/bigwave/bigwave/controlplane/internal/run"
)

// Counts tells how many runs and sessions there are, by status.
type Counts func(ctx context.Context) (runs, sessions map[string]int64, err error)

// observer counts what is asked of this replica. Labels are route templates
// and statuses, never ids.
type observer struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	runTime  *prometheus.HistogramVec
	runs     *prometheus.GaugeVec
	sessions *prometheus.GaugeVec
}

func newObserver(reg prometheus.Registerer) *observer {
	buckets := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 900}
	o := &observer{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bigwave_http_requests_total", Help: "Requests by route, method and status.",
		}, []string{"route", "method", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bigwave_http_request_seconds", Help: "Time to answer by route, streams included.", Buckets: buckets,
		}, []string{"route", "method"}),
		runTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bigwave_run_seconds", Help: "Duration of runs whose end a client here waited for, by status.", Buckets: buckets,
		}, []string{"status"}),
		runs: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "bigwave_runs", Help: "Runs in the database by status.",
		}, []string{"status"}),
		sessions: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "bigwave_sessions", Help: "Sessions in the database by status.",
		}, []string{"status"}),
	}
	reg.MustRegister(o.requests, o.seconds, o.runTime, o.runs, o.sessions)
	return o
}

func (o *observer) request(c echo.Context, took time.Duration) {
	route, method := c.Path(), c.Request().Method
	if route == "" {
		route, method = "unmatched", "any"
	}
	o.requests.WithLabelValues(route, method, status(c)).Inc()
	o.seconds.WithLabelValues(route, method).Observe(took.Seconds())
}

// ended notes a run whose end its client is about to see.
func (o *observer) ended(r run.Run) {
	if r.Status.Final() && !r.FinishedAt.IsZero() {
		o.runTime.WithLabelValues(string(r.Status)).Observe(r.FinishedAt.Sub(r.CreatedAt).Seconds())
	}
}

func set(g *prometheus.GaugeVec, counts map[string]int64) {
	g.Reset()
	for status, n := range counts {
		g.WithLabelValues(status).Set(float64(n))
	}
}

// metrics answers with what this replica counted and, as far as the database
// answers, what it holds.
func (s *Server) metrics(c echo.Context) error {
	ctx := c.Request().Context()
	runs, sessions, err := s.Counts(ctx)
	if err != nil {
		s.Log.WarnContext(ctx, "nothing counted for the metrics", "request_id", requestID(c), "error", err)
	}
	set(s.observer.runs, runs)
	set(s.observer.sessions, sessions)
	promhttp.HandlerFor(s.Metrics, promhttp.HandlerOpts{}).ServeHTTP(c.Response(), c.Request())
	return nil
}

type healthResponse struct {
	Status string `json:"status"`
}

// health says that the process answers; what it needs is ready's to say.
func (s *Server) health(c echo.Context) error {
	return write(c, http.StatusOK, healthResponse{Status: "ok"})
}
