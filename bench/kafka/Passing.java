import com.fasterxml.jackson.annotation.JsonProperty;
import com.fasterxml.jackson.databind.ObjectReader;
import com.fasterxml.jackson.databind.ObjectWriter;
import com.fasterxml.jackson.databind.json.JsonMapper;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.KStream;

/**
 * Kafka Streams with exactly_once_v2 (KIP-447), one job after the other in one warm JVM.
 *
 * <p>Arguments: brokers, state directory, what "late" is in minutes. Each line of standard input is
 * a job: "bytes" or "json", input topic, output topic, records of the input. The answer is the
 * millisecond since 1970 at which the first record was in hand. An application is closed, which
 * commits, as soon as it has had all records.
 */
public final class Passing {
    record Flight(
            long id,
            String carrier,
            int flight,
            @JsonProperty("time_hour") String timeHour,
            @JsonProperty("dep_delay") double depDelay) {}

    private static final ObjectReader READER = JsonMapper.builder().build().readerFor(Flight.class);
    private static final ObjectWriter WRITER = JsonMapper.builder().build().writerFor(Flight.class);

    /** Counts the input: when it began, and when nothing is left. */
    private static final class Progress {
        private final AtomicLong left;
        private final long total;
        final CountDownLatch done = new CountDownLatch(1);
        volatile long began;

        Progress(long total) {
            this.total = total;
            this.left = new AtomicLong(total);
        }

        void one() {
            long now = left.decrementAndGet();
            if (now == total - 1) {
                began = System.currentTimeMillis();
            } else if (now == 0) {
                done.countDown();
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader jobs = new BufferedReader(new InputStreamReader(System.in));
        for (String line = jobs.readLine(); line != null; line = jobs.readLine()) {
            String[] job = line.split(" ");
            Progress progress = new Progress(Long.parseLong(job[3]));
            StreamsBuilder builder = new StreamsBuilder();
            KStream<byte[], byte[]> input = builder.stream(job[1]);
            input = input.peek((key, value) -> progress.one());
            double late = Double.parseDouble(arguments[2]);
            (job[0].equals("json") ? delayed(input, late) : input).to(job[2]);
            run(builder, settings(arguments, job[2]), progress);
            System.out.println(progress.began);
        }
    }

    private static KStream<byte[], byte[]> delayed(KStream<byte[], byte[]> input, double late) {
        return input.mapValues(Passing::read)
                .filter((key, flight) -> flight.depDelay() > late)
                .mapValues(Passing::written);
    }

    private static Flight read(byte[] value) {
        try {
            return READER.readValue(value);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static byte[] written(Flight flight) {
        try {
            return WRITER.writeValueAsBytes(flight);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static Properties settings(String[] arguments, String application) {
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, arguments[1]);
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, application);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 2);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 1000);
        Class<?> bytes = Serdes.ByteArray().getClass();
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, bytes);
        settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, bytes);
        return settings;
    }

    private static void run(StreamsBuilder builder, Properties settings, Progress progress)
            throws InterruptedException {
        try (KafkaStreams streams = new KafkaStreams(builder.build(), settings)) {
            streams.setUncaughtExceptionHandler(
                    error -> {
                        error.printStackTrace();
                        Runtime.getRuntime().halt(1); // the bench sees the end of our output
                        return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
                    });
            streams.start();
            progress.done.await();
            streams.close(Duration.ofSeconds(60));
        }
    }
}
