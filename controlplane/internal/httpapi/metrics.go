package httpapi

import (
	"net/http"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// observer counts requests. Labels are route templates, never ids.
type observer struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
}

func newObserver(reg prometheus.Registerer) *observer {
	o := &observer{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bigwave_http_requests_total", Help: "Requests by route, method and status.",
		}, []string{"route", "method", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bigwave_http_request_seconds", Help: "Time to answer by route, streams included.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300},
		}, []string{"route", "method"}),
	}
	reg.MustRegister(o.requests, o.seconds)
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

// RunMetrics counts what becomes of runs and sessions. Whoever moves them
// forward calls it; it may be called from several goroutines.
type RunMetrics struct {
	runs     *prometheus.CounterVec
	calls    *prometheus.CounterVec
	seconds  prometheus.Histogram
	starting prometheus.Histogram
}

// NewRunMetrics registers the metrics with reg.
func NewRunMetrics(reg prometheus.Registerer) *RunMetrics {
	buckets := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 900}
	m := &RunMetrics{
		runs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bigwave_runs_total", Help: "Runs that ended, by status.",
		}, []string{"status"}),
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bigwave_calls_total", Help: "Calls that ended, by status.",
		}, []string{"status"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "bigwave_run_seconds", Help: "From a run's start to its end.", Buckets: buckets,
		}),
		starting: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "bigwave_session_start_seconds", Help: "From a session's ticket to its live sandbox.", Buckets: buckets,
		}),
	}
	reg.MustRegister(m.runs, m.calls, m.seconds, m.starting)
	return m
}

// RunEnded counts a run that became final after d.
func (m *RunMetrics) RunEnded(status string, d time.Duration) {
	m.runs.WithLabelValues(status).Inc()
	m.seconds.Observe(d.Seconds())
}

// CallEnded counts a call that became final.
func (m *RunMetrics) CallEnded(status string) { m.calls.WithLabelValues(status).Inc() }

// SessionStarted counts a sandbox that came up after d.
func (m *RunMetrics) SessionStarted(d time.Duration) { m.starting.Observe(d.Seconds()) }

func (s *Server) metrics(c echo.Context) error {
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
